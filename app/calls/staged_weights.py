"""Weights that a trainer has copied into its node's shared memory, before any replica loads them."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tailrace.app.calls.refused import accepted
from tailrace.deployments.messages.roles import Role, refusal
from tailrace.deployments.staging.slots import Slots, service_name
from tailrace.deployments.staging.stage import Stage, bytes_of, pairs_of

Tensors = Mapping[str, object] | Iterable[tuple[str, object]]


@dataclass(frozen=True)
class StagedWeights:
    """Weights in this node's shared memory that no replica has loaded. `seconds`: duration of the copy."""

    version: int
    tensors: int
    staged_bytes: int
    seconds: float
    stage: Stage

    def drop(self) -> None:
        """Frees their memory; nothing was committed."""
        self.stage.drop()


def staged_in(slots: Slots, version: int, served: tuple[int, str], tensors: Tensors) -> StagedWeights:
    """Copies tensors into a slot of this node. `served`: version and digest of the present weights."""
    began_s = time.monotonic()
    stage = Stage(slots, version, served, bytes_of(tensors))
    try:
        for name, tensor in pairs_of(tensors):
            stage.add(name, tensor)
    except BaseException:  # any error: it is raised again
        stage.drop()
        raise
    return StagedWeights(version, stage.tensors, stage.staged_bytes, time.monotonic() - began_s, stage)


class Staging:
    """A service's slots in this node's shared memory. `role`: the client's; only a trainer owns slots."""

    def __init__(self, role: Role, app_name: str):
        self._role, self._app_name = role, app_name

    async def stage(self, version: int, served: tuple[int, str], tensors: Tensors) -> StagedWeights:
        """See `RolloutClient.stage_weights` and `staged_in`."""
        slots = Slots(self.name())
        keeping = asyncio.create_task(self.own_slots())
        try:
            return await asyncio.to_thread(staged_in, slots, version, served, tensors)
        finally:
            await keeping

    async def own_slots(self) -> str:
        """See `RolloutClient.own_slots`."""
        from tailrace.deployments.staging.keeper import keep_slots

        accepted(refusal(self._role, Role.TRAINER, "own_slots"), "own_slots")
        await asyncio.to_thread(keep_slots, self.name(), self._app_name)
        return self.name()

    def name(self) -> str:
        """Returns the name of the service's slots."""
        import ray

        return service_name(self._app_name, ray.get_runtime_context().gcs_address)
