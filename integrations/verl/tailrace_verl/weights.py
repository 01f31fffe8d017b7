"""The trainer's weights on their way to the service: each rank publishes its share from memory.

verl gathers every tensor on every rank. Invariant: one rank keeps and publishes a tensor, and all ranks know which from
the sizes of the tensors before it. `send` is used by both ways: `TailraceWeights` (trainer and rollout in one worker
group) and the checkpoint engine (apart).
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

import ray
import torch
from torch import distributed
from verl.workers.rollout.base import BaseRollout

from tailrace.app.calls.publishing_rank import this_node
from tailrace.app.cluster import connect
from tailrace.app.trl.weights_folders import WeightsFolders
from tailrace.weights import begin
from tailrace_verl.settings import SERVER
from tailrace_verl.weights_update import WeightsUpdate

COMMITTED = "tailrace_committed"
"""Wire format of the checkpoint engine: its senders have committed the weights, so no tensor comes."""

Tensors = Iterable[tuple[str, torch.Tensor]]


async def send(tensors: Tensors, global_steps: int | None) -> dict[str, int]:
    """Publishes whole tensors, which all ranks must be given in one order; to be called on every rank.

    Returns metrics: the version, and the bytes that this rank has published from memory. Raises WeightsRejected, one
    line, on every rank if the version has ended. With `weights_dir` the first rank alone raises it, and the others
    return before the version is loaded.
    """
    server = ray.get_actor(SERVER)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    nodes, update = await _agreed(server, rank, global_steps)
    metrics = {"tailrace/weights_version": update.version}
    expected = ((name, tensor) for name, tensor in tensors if name not in update.unsaved)
    try:
        if update.settings.weights_dir is not None:
            await _write(server, update, expected, rank)
            return metrics
        given = {each: 0 for each, node in enumerate(nodes) if node == nodes[0]}
        client = await asyncio.to_thread(connect, update.settings.address, update.settings.app_name)
        publishing = begin(update.version, share_of(expected, rank, given), client=client)  # gathers on this thread
    finally:
        for _ in expected:  # gathering needs every rank, also after an error here
            pass
    await asyncio.to_thread(publishing.wait)
    return metrics | ({f"tailrace/published_bytes/rank_{rank}": given[rank]} if rank in given else {})


def share_of(tensors: Tensors, rank: int, given: dict[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a rank's share, in host memory. Each tensor goes to the sharer with the fewest bytes so far.

    `given`: these bytes, by sharer; they are counted here.
    """
    for name, tensor in tensors:
        owner = min(given, key=given.__getitem__)
        given[owner] += tensor.nbytes
        if owner == rank:
            yield name, tensor.detach().to("cpu")


async def _agreed(server, rank: int, global_steps: int | None) -> tuple[list[str], WeightsUpdate]:
    """Returns the node of each rank, and the update, which the first rank asks for. Raises its error there, and
    RuntimeError on the others.
    """
    update, error = None, None
    if rank == 0:
        try:
            update = await server.next_weights.remote(global_steps)
        except Exception as raised:  # noqa: BLE001 - the other ranks wait for it
            error = raised
    own = this_node(), update
    met = [own]
    if distributed.is_initialized():
        met = [None] * distributed.get_world_size()
        distributed.all_gather_object(met, own)
    if error is not None:
        raise error
    if met[0][1] is None:
        raise RuntimeError("the trainer's first rank got no version of the weights; its own error says why")
    return [node for node, _ in met], met[0][1]


async def _write(server, update: WeightsUpdate, tensors: Tensors, rank: int) -> None:
    """Writes the folder on the first rank, and has it loaded."""
    if rank == 0:
        folder = WeightsFolders(update.settings.weights_dir).write(update.version, tensors)
        await server.load_weights.remote(update.version, str(folder))


class TailraceWeights(BaseRollout):
    """The rollout side of an update of verl's."""

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
        if wire_format != COMMITTED:
            await send(tensors, kwargs.get("global_steps"))
