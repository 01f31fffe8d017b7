"""One rank of a trainer that publishes a version of the weights together with others: its calls, and the bytes that it
writes.

Invariant: every wait has a limit, and a rank that gives up ends its version on all ranks. Called by
`tailrace.weights.publish`, and by the gateway for ranks that upload.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import WeightsRejected
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.pieces import PieceEnd, PublishPhase, RankPart, RankPlan, StagedPiece, TensorPiece
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.piece_files import PieceFiles, checksum_of_piece
from tailrace.deployments.staging.slots import AlreadyStaging, MemorySource, Slots
from tailrace.deployments.staging.stage import Stage, StageRefused, as_bytes, room_for

LOAD_S = 1200.0
"""Maximum seconds for the replicas to check and then to load, beyond the ranks' own phases."""


FETCH_S = 60.0
"""Maximum seconds to fetch one piece from another node."""

Held = Sequence[tuple[TensorPiece, object]]
"""Pieces of a rank, each with its values: a torch tensor, a numpy array, or None if they come later."""


@dataclass(frozen=True)
class PublishingRank:
    """The calls of one rank for one version."""

    client: RolloutClient
    version: int
    rank: int
    node: str

    async def publish(self, part: RankPart, pieces: Held, staged: Callable[[], None]) -> WeightsLoaded:
        """Joins, stages and waits for the end. `part`: without its node. `staged`: called once tensors may change."""
        try:
            return await self._publish(part, pieces, staged)
        except WeightsRejected:
            raise
        except BaseException as error:  # of this rank: the others have to hear of it, and it is raised again
            await self.give_up(error)
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"weights {self.version}: the service does not answer") from error
            raise

    async def give_up(self, error: BaseException) -> None:
        """Ends the version on all ranks, also those that have not joined, if the service can be reached."""
        with contextlib.suppress(Exception):  # the service is unreachable, or the version has ended
            async with asyncio.timeout(RENEW_S):
                reason = str(error) if isinstance(error, StageRefused) else one_line(error)
                await self._call(PublishPhase.FAILED, reason)

    async def _publish(self, part: RankPart, pieces: Held, staged: Callable[[], None]) -> WeightsLoaded:
        slots, status = Slots(await self.client.own_slots()), await self.client.status()
        stage = await asyncio.to_thread(_lead, slots, self.version, (status.weights_version, status.weights_digest))
        renewing = asyncio.create_task(self._renew())
        try:
            part = part._replace(node=self.node, leads=stage is not None)
            async with asyncio.timeout(4 * part.timeout_s + LOAD_S):
                plan = await self._call(PublishPhase.JOIN, part)
                leads = stage is not None and not plan.ships
                if leads:
                    await asyncio.to_thread(stage.lay, plan.tensors)
                elif stage is not None:
                    stage.drop()  # it is another node's; replicas of this node pull the version under the same lock
                ends = await self._stage(slots, plan, pieces)
                staged()
                answer = await self._call(PublishPhase.STAGED, ends)
                if leads:
                    source = await asyncio.to_thread(self._seal, slots, plan, stage, answer)
                    answer = await self._call(PublishPhase.SEALED, source)
                return answer
        finally:
            renewing.cancel()
            if stage is not None:
                stage.drop()

    async def _stage(self, slots: Slots, plan: RankPlan, pieces: Held) -> tuple[PieceEnd, ...]:
        """Returns the ends of the plan's pieces, in its order, once they are written or shipped."""
        return await asyncio.to_thread(self._ship if plan.ships else self._write, slots, plan, pieces)

    def _call(self, phase: PublishPhase, content: object = None) -> Awaitable:
        return self.client.publishing.run(phase, self.version, self.rank, content)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(Exception):  # the service is unreachable; the call under way raises
                await self._call(PublishPhase.RENEW)

    def _write(self, slots: Slots, plan: RankPlan, pieces: Held) -> tuple[PieceEnd, ...]:
        """Writes the pieces of the plan to their places."""
        ends = []
        with contextlib.closing(PieceFiles(slots.part, plan.tensors)) as files:
            for piece, values in map(pieces.__getitem__, plan.written):
                _, _, data = as_bytes(str(piece), values)
                with room_for(slots, f"weights {self.version}: {piece} needs {len(data):,} bytes"):
                    files.write(piece, data)
                ends.append(PieceEnd(checksum_of_piece(piece, data)))
        return tuple(ends)

    def _ship(self, slots: Slots, plan: RankPlan, pieces: Held) -> tuple[PieceEnd, ...]:
        """Copies the pieces of the plan into Ray's memory: the stage is on another node."""
        ends = []
        for piece, values in map(pieces.__getitem__, plan.written):
            _, _, data = as_bytes(str(piece), values)
            ends.append(PieceEnd(checksum_of_piece(piece, data), _in_ray(data)))
        return tuple(ends)

    def _seal(self, slots: Slots, plan: RankPlan, stage: Stage, staged: tuple[StagedPiece, ...]) -> MemorySource:
        """Writes the pieces of other nodes, checks all, and seals. Raises StageRefused."""
        with contextlib.closing(PieceFiles(slots.part, plan.tensors)) as files:
            for rank, piece, end in staged:
                if end.shipped is not None:
                    data = _from_ray(end.shipped, f"rank {rank}: {piece}")
                    with room_for(slots, f"weights {self.version}: {piece} needs {len(data):,} bytes"):
                        files.write(piece, data)
        return stage.seal(staged)


def _lead(slots: Slots, version: int, served: tuple[int, str]) -> Stage | None:
    """Returns the stage of this node, or None if another rank, or another trainer, has it."""
    with contextlib.suppress(AlreadyStaging):
        return Stage(slots, version, served)
    return None


def this_node() -> str:
    """Returns the id of this process's node."""
    import ray

    return ray.get_runtime_context().get_node_id()


def _in_ray(data: memoryview) -> object:
    """Returns a reference to a copy of these bytes, which ends with this process."""
    import numpy as np
    import ray

    return ray.put(np.frombuffer(data, np.uint8))


def _from_ray(shipped: object, what: str) -> memoryview:
    import ray

    try:
        return memoryview(ray.get(shipped, timeout=FETCH_S))
    except ray.exceptions.RayError as error:  # its rank has ended, or a node is gone
        raise StageRefused(f"{what} cannot be fetched: {one_line(error)}") from error
