"""A platform without an accelerator for verl 0.9.1, whose own trainer then runs on a CPU. For trying out.

Loaded by `VERL_USE_EXTERNAL_MODULES=verl_on_a_cpu` and chosen by `VERL_PLATFORM=cpu`, verl's own plug-in points. With
them go `VERL_ENGINE_DEVICE=cuda`, since FSDP's engines are registered under that name, and a Ray cluster that is told
of as many GPUs as the trainer has ranks. One function of verl is patched, see `_patch`.
"""

import contextlib
import functools
from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

CPU = torch.device("cpu")


def nothing(*args, **kwargs) -> None:
    """In the place of calls that a CPU has no need of."""


NO_DEVICE = SimpleNamespace(
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "current_stream"), nothing),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), lambda: 0),
    is_available=lambda: False,
    device_count=lambda: 0,
    current_device=lambda: CPU,
    get_device_name=lambda *_: "cpu",
    mem_get_info=lambda: (0, 0),
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    stream=lambda *_: contextlib.nullcontext(),
)
"""In the place of `torch.cuda`."""


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):
    """The names of methods and attributes are verl's."""

    device_name, vendor_name, device_module = "cpu", "none", NO_DEVICE
    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = nothing
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return CPU

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def nvtx_range(self, msg: str):
        return contextlib.nullcontext()


def _patch() -> None:
    """verl asks torch for the backends of the CPU and of the platform's device, here the same one; torch takes no
    device twice.
    """
    from verl.utils import distributed

    made = distributed.initialize_global_process_group_ray
    distributed.initialize_global_process_group_ray = functools.partial(made, backend="cpu:gloo")


_patch()
