"""verl's transport of weights from trainer to rollout, where both are apart: `checkpoint_engine.backend=tailrace`.

Invariant: the trainer's ranks publish their shares; the rollout's worker gets no tensor. So no process group is made.
"""

from collections.abc import AsyncIterator, Iterator

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from tailrace_verl.weights import COMMITTED, send


@CheckpointEngineRegistry.register("tailrace")
class TailraceCheckpointEngine(CheckpointEngine):
    wire_format = COMMITTED

    def __init__(self, bucket_size: int, is_master: bool = False):
        """Both are verl's, and have no use here."""

    def prepare(self) -> dict:
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        """Nothing to give to `init_process_group`, on either side."""
        return {}, {}

    def init_process_group(self) -> None:
        """Ranks meet in the service."""

    def finalize(self) -> None:
        """The last version stays: replicas that start later read it."""

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict:
        """Returns metrics of the step, which verl joins over the ranks. Passes on the errors of `send`."""
        return await send(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """No tensor: the sender commits."""
        return
        yield
