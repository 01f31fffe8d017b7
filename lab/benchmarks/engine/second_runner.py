"""vLLM's second model runner (V2) on a CPU: its own code, with its Triton kernels interpreted.

vLLM has V2 for CPUs, but refuses it without a Triton that compiles for CPUs. Here V2's files are loaded again with the
interpreter's Triton, and our engines draw with the samplers of GPUs. Called by overhead_engines.py and by tests.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from unittest.mock import patch

from tailrace.lab.benchmarks.engine import interpreted

ROOM, OF_CPUS = "vllm.v1.worker.gpu", "vllm.v1.worker.cpu"
RELOADED = (ROOM, f"{OF_CPUS}.model_runner")


def _loaded() -> dict:
    return {n: m for n, m in sys.modules.items() if any(n == each or n.startswith(f"{each}.") for each in RELOADED)}


@contextmanager
def second_runner() -> Iterator:
    """Yields vLLM's module `v1/worker/gpu/model_runner.py`. In this block, engines of this process may use V2."""
    interpreted.interpreted()
    import triton
    import vllm.config.vllm
    import vllm.envs
    import vllm.platforms
    import vllm.triton_utils
    import vllm.v1.worker.cpu_worker  # its import replaces parts of torch.cuda by ones that do nothing

    from tailrace.deployments.vllm_exact import worker

    before = _loaded()
    with ExitStack() as patches:
        patches.enter_context(patch.object(vllm.config.vllm, "HAS_TRITON", True))
        for name, value in {"triton": triton, "tl": triton.language, "HAS_TRITON": True}.items():
            patches.enter_context(patch.object(vllm.triton_utils, name, value))
        patches.enter_context(patch.object(worker.ExactCPUWorker, "sampler_of", _sampler))
        platform = type(vllm.platforms.current_platform)
        patches.enter_context(patch.object(platform, "check_and_update_config", _checked(platform)))
        patches.enter_context(patch.dict(os.environ, {"TRITON_INTERPRET": "1"}))
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
    vllm.envs.disable_envs_cache()  # an engine that has not ended keeps vLLM's settings cached


def _checked(platform: type) -> classmethod:
    """Returns the replacement of `Platform.check_and_update_config`: as on a GPU, asynchronous scheduling stays on.

    vLLM also calls the replacement with a draft model's configuration, which shares the scheduler's with the model.
    """
    inner = platform.check_and_update_config

    def check_and_update_config(_, config) -> None:
        scheduling = config.scheduler_config.async_scheduling
        inner(config)
        config.scheduler_config.async_scheduling = scheduling

    return classmethod(check_and_update_config)


def _sampler(_worker, runner):
    """Replaces `ExactCPUWorker.sampler_of`."""
    from tailrace.deployments.vllm_exact.fused.sampler_v2 import SamplerV2

    return SamplerV2(runner)
