"""The contents of the pack, by name: packages, parts of vLLM's wheel, the chip, the size that may not be exceeded.

The machine meant has Python 3.12 with torch 2.11 for CUDA 13, Triton, transformers, numpy and numba, and no network.
No model is carried: the smallest useful one is larger than all of this, and random weights, made there in seconds, are
the harder test of exactness.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LOCK = ROOT / "requirements" / "gpu.txt"

PYTHON = "3.12"
ARCHITECTURE = 90
"""Hopper's: H100, H200."""

LIMIT_BYTES = 56 << 20
"""With the repository it stays below 64 MiB, the most that goes to some lent machines in one call."""

VLLM = "vllm"
POOL = "mooncake-transfer-engine-cuda13"

PACKAGES = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "msgspec", "pyzmq", "cachetools", "cbor2",
    "blake3", "openai", "jiter", "sniffio", "httpx2", "httpcore2", "truststore", "oss-harmony", "pybase64", "xgrammar",
    "apache-tvm-ffi", "fastapi", "starlette", "partial-json-parser", "llguidance", "compressed-tensors", "loguru",
    "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions",
)  # fmt: skip
"""Imported by vLLM, or by us, before the first step of an engine."""

LEFT_OUT = (
    "vllm/vllm-rs", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/third_party/tml_fa4/",
    "_vllm_fa2_C", "_flashmla", "_flashkda", "_deepselect", "_qutlass", "/static/",
    "vllm/benchmarks/", "vllm/kernels/helion/configs", "vllm/model_executor/layers/fused_moe/configs/",
    "vllm/model_executor/layers/quantization/utils/configs/", "/docs/", "/tests/",
)  # fmt: skip
"""Parts of vLLM that the steps' models do not load on Hopper."""

PRUNED = "_C_stable_libtorch"
"""The library that has code for every chip; the others are of Hopper alone, or small."""

SOURCES = (".pyi", ".h", ".hpp", ".c")
"""Endings of files in packages that nothing reads at run time."""

ALONE = {PRUNED: "operators", "_vllm_fa3_C": "flash-attention-3"}
"""Libraries with an archive each: archives are packed and unpacked side by side."""


def version_of(name: str, lock: str) -> str:
    """Returns a package's version in a lock's text. Raises ValueError if it is not there."""
    for line in lock.splitlines():
        if line.startswith(f"{name}=="):
            return line.removeprefix(f"{name}==").split()[0]
    raise ValueError(f"{LOCK.relative_to(ROOT)}: no pin of {name}; name it in pyproject.toml and run `make lock`")
