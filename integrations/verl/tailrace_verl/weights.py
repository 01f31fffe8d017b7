"""The trainer's weights on their way to the service: a folder of safetensors, then one call.

Invariant: a folder is whole before the service hears of it, and never the one that the service has now.
`stage_and_commit` is used by both ways: `TailraceWeights` (trainer and rollout in one worker group) and the checkpoint
engine (apart).
"""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import ray
import torch
from verl.workers.rollout.base import BaseRollout

from tailrace.app.trl.weights_folders import WeightsFolders
from tailrace_verl.settings import SERVER

COMMITTED = "tailrace_committed"
"""Wire format of the checkpoint engine: its sender has committed the weights, so no tensor comes."""


async def stage_and_commit(tensors: Iterable[tuple[str, torch.Tensor]], global_steps: int | None, server: str) -> int:
    """Writes the tensors and has the service load them. Returns the version. Passes on the service's refusal."""
    handle = ray.get_actor(server)
    version, root = await handle.next_weights.remote()
    folder = WeightsFolders(Path(root)).write(version, tensors)
    await handle.commit_weights.remote(version, str(folder), global_steps)
    return version


def is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class TailraceWeights(BaseRollout):
    """The rollout side of an update of verl's. Every rank takes the tensors, since gathering needs them all."""

    is_leader_rank = True

    def __init__(self, config, model_config, device_mesh, *args, replica_rank: int = 0, **kwargs):
        # BaseRollout's own would load the model's configuration and tokenizer, which nothing here needs
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh
        self.replica_rank = replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """The engines have GPUs of their own."""

    async def update_weights(self, weights, wire_format: str = "named_tensors", **kwargs) -> None:
        """Raises ValueError for adapters and deltas: the service takes whole tensors."""
        if wire_format not in ("named_tensors", COMMITTED):
            raise ValueError(f"wire_format {wire_format}: not supported; the service takes whole tensors")
        if kwargs.get("peft_config") is not None:
            raise ValueError("model.lora: adapters are not supported; set actor_rollout_ref.model.lora.merge=True")
        tensors = [pair async for pair in weights] if isinstance(weights, AsyncIterator) else weights
        if wire_format == COMMITTED or not is_first_rank():
            for _ in tensors:
                pass
        else:
            await stage_and_commit(tensors, kwargs.get("global_steps"), SERVER)
