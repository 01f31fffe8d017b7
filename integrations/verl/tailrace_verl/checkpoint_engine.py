"""verl's transport of weights from trainer to rollout, where both are apart: `checkpoint_engine.backend=tailrace`.

Invariant: rank 0 of the trainer writes and commits; every other rank takes the tensors and drops them; the rollout's
worker gets none. So no process group is made.
"""

from collections.abc import AsyncIterator, Iterator

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from tailrace_verl.settings import SERVER
from tailrace_verl.weights import COMMITTED, stage_and_commit


@CheckpointEngineRegistry.register("tailrace")
class TailraceCheckpointEngine(CheckpointEngine):
    """`is_master`: on the trainer's rank 0. `bucket_size` is verl's and has no use here."""

    wire_format = COMMITTED

    def __init__(self, bucket_size: int, is_master: bool = False):
        self._is_master = is_master

    def prepare(self) -> dict:
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        """Nothing to give to `init_process_group`, on either side."""
        return {}, {}

    def init_process_group(self) -> None:
        """Weights travel through a folder."""

    def finalize(self) -> None:
        """The last folder stays: replicas that start later read it."""

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict:
        """Returns the version as a metric of the step. Passes on the service's refusal."""
        if self._is_master:
            return {"tailrace/weights_version": await stage_and_commit(weights, global_steps, SERVER)}
        for _ in weights:
            pass
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """No tensor: the sender commits."""
        return
        yield
