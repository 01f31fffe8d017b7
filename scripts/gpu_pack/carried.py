"""Names and limits of the pack's contents: packages, parts of vLLM's wheel, the chip, the maximum size.

The pack is for a machine that has Python 3.12 with torch 2.11 for CUDA 13, Triton, transformers, numpy and numba, and
no network. It has no model: the smallest useful one is larger than the whole pack. Random weights are made on the
machine in seconds, and are the harder test of exactness.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LOCK = ROOT / "requirements" / "gpu.txt"

PYTHON = "3.12"
ARCHITECTURE = 90
"""Number of Hopper's architecture: H100, H200."""

LIMIT_BYTES = 56 << 20
"""Maximum bytes of the pack: with the repository it stays below 64 MiB, the maximum for some lent machines in
one call.
"""

VLLM = "vllm"
POOL = "mooncake-transfer-engine-cuda13"

PACKAGES = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "msgspec", "pyzmq", "cachetools", "cbor2",
    "blake3", "openai", "jiter", "sniffio", "httpx2", "httpcore2", "truststore", "oss-harmony", "pybase64", "xgrammar",
    "apache-tvm-ffi", "fastapi", "starlette", "partial-json-parser", "llguidance", "compressed-tensors", "loguru",
    "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-semantic-conventions",
)  # fmt: skip
"""Names of packages that vLLM or this repository imports before the first step of an engine."""

LEFT_OUT = (
    "vllm/vllm-rs", "vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/third_party/tml_fa4/",
    "_vllm_fa2_C", "_flashmla", "_flashkda", "_deepselect", "_qutlass", "/static/",
    "vllm/benchmarks/", "vllm/kernels/helion/configs", "vllm/model_executor/layers/fused_moe/configs/",
    "vllm/model_executor/layers/quantization/utils/configs/", "/docs/", "/tests/",
)  # fmt: skip
"""Parts of the paths of vLLM's files that are left out: the steps' models do not load them on Hopper."""

PRUNED = "_C_stable_libtorch"
"""Part of the name of the library that has code for every chip. Other libraries are for Hopper alone, or small."""

SOURCES = (".pyi", ".h", ".hpp", ".c")
"""Endings of files in packages that nothing reads at run time."""

ALONE = {PRUNED: "operators", "_vllm_fa3_C": "flash-attention-3"}
"""Names of archives with one library each, by a part of the library's name. Archives are packed and unpacked in
parallel.
"""


def version_of(name: str, lock: str) -> str:
    """Returns a package's version in a lock's text. Raises ValueError if the lock has no pin of the package."""
    for line in lock.splitlines():
        if line.startswith(f"{name}=="):
            return line.removeprefix(f"{name}==").split()[0]
    raise ValueError(f"{LOCK.relative_to(ROOT)}: no pin of {name}; name it in pyproject.toml and run `make lock`")
