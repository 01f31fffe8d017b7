"""vLLM's second model runner on a CPU: its own code, its Triton kernels interpreted, as no GPU is there.

vLLM has V2 for CPUs, but refuses it without a Triton that compiles for them. Here V2's files are loaded again, with the
interpreter's Triton.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from tailrace.lab.benchmarks.engine import interpreted

ROOM, OF_CPUS = "vllm.v1.worker.gpu", "vllm.v1.worker.cpu"
RELOADED = (ROOM, f"{OF_CPUS}.model_runner")


def _loaded() -> dict:
    return {n: m for n, m in sys.modules.items() if any(n == each or n.startswith(f"{each}.") for each in RELOADED)}


@contextmanager
def second_runner(monkeypatch) -> Iterator:
    """Yields vLLM's module `v1/worker/gpu/model_runner.py`; meanwhile engines of this process may take V2."""
    interpreted.interpreted()
    import triton
    import vllm.config.vllm
    import vllm.triton_utils
    import vllm.v1.worker.cpu_worker  # it has the parts of torch that are of GPUs do nothing

    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)
    for name, value in {"triton": triton, "tl": triton.language, "HAS_TRITON": True}.items():
        monkeypatch.setattr(vllm.triton_utils, name, value)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    before = _loaded()
    for name in before:
        del sys.modules[name]
    try:
        import_module(f"{ROOM}.buffer_utils").UvaBuffer = import_module(f"{OF_CPUS}.buffer_utils").UvaBuffer
        yield import_module(f"{ROOM}.model_runner")
    finally:
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(before)
        interpreted.forget()
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
