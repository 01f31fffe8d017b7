"""Ranks of a trainer without Ray, which upload what they hold: the gateway writes it into its node's shared memory.

A rank's part of a version is one task here, `PublishingRank.publish`, whose values come with requests. Invariants: a
piece is taken once, with the rank's own checksum, and one that is refused changes nothing; no wait is longer than the
ranks' limit. All ranks of a version use one gateway.
"""

import asyncio
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.publishing_rank import Held, PublishingRank, this_node
from tailrace.deployments.messages.pieces import PieceEnd, PublishPhase, RankPart, RankPlan
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.piece_files import PieceFiles
from tailrace.deployments.staging.safetensors_header import ITEM_BYTES
from tailrace.deployments.staging.slots import Slots
from tailrace.deployments.staging.stage import StageRefused, room_for


class Upload(NamedTuple):
    """A piece that has come: its number in the rank's part, checksum and bytes. `written`: set once it is in place."""

    number: int
    checksum: str
    data: bytes
    written: asyncio.Future


def _future() -> asyncio.Future:
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True)
class UploadedRank(PublishingRank):
    """`timeout_s`: of its part. `planned`: the numbers of the pieces to upload, once all ranks have joined."""

    timeout_s: float = 0.0
    planned: asyncio.Future = field(default_factory=_future)
    uploads: asyncio.Queue = field(default_factory=asyncio.Queue)

    async def _stage(self, slots: Slots, plan: RankPlan, pieces: Held) -> tuple[PieceEnd, ...]:
        self.planned.set_result(plan.written)
        ends: dict[int, PieceEnd] = {}
        with closing(await asyncio.to_thread(PieceFiles, slots.part, plan.tensors)) as files:
            while len(ends) < len(plan.written):
                one = await self._next_upload()
                try:
                    if one.number not in ends:
                        await asyncio.to_thread(self._take, slots, files, plan, pieces, one)
                except (StageRefused, OSError) as error:
                    one.written.set_exception(error)
                else:
                    ends[one.number] = PieceEnd(one.checksum)
                    one.written.set_result(None)
        return tuple(map(ends.__getitem__, plan.written))

    async def _next_upload(self) -> Upload:
        """Waits for a piece. Raises WeightsRejected if the version has ended, StageRefused if none comes."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self.uploads.get()
        except TimeoutError:
            await self._call(PublishPhase.RENEW)
            raise StageRefused(f"no piece has come for {self.timeout_s:g} s") from None

    def _take(self, slots: Slots, files: PieceFiles, plan: RankPlan, pieces: Held, one: Upload) -> None:
        where = f"weights {self.version}: rank {self.rank}: piece {one.number}"
        if one.number not in plan.written:
            raise StageRefused(f"{where} is not to be uploaded; those are in the answer to join")
        piece, _ = pieces[one.number]
        if len(one.data) != (size := piece.values * ITEM_BYTES[piece.tensor.kind]):
            raise StageRefused(f"{where}, {piece}, has {size:,} bytes, and {len(one.data):,} have come")
        with room_for(slots, f"weights {self.version}: {piece} needs {size:,} bytes"):
            files.write(piece, memoryview(one.data))


class UploadedRanks:
    """The ranks that this gateway writes for, by version and rank."""

    def __init__(self):
        self._ranks: dict[tuple[int, int], tuple[UploadedRank, asyncio.Task[WeightsLoaded]]] = {}

    async def join(self, client: RolloutClient, version: int, rank: int, part: RankPart) -> tuple[int, ...]:
        """Returns the numbers of the pieces to upload, once all ranks have joined. Raises WeightsRejected."""
        self._ranks = {name: one for name, one in self._ranks.items() if name[0] >= version or not one[1].done()}
        one = UploadedRank(client, version, rank, this_node(), part.timeout_s)
        task = asyncio.create_task(one.publish(part, [(piece, None) for piece in part.pieces], lambda: None))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # a rank may never ask for it
        self._ranks[version, rank] = one, task
        return await _first(one.planned, task)

    async def upload(self, version: int, rank: int, number: int, checksum: str, data: bytes) -> None:
        """Writes a piece. Raises StageRefused, one line, for one that does not fit, WeightsRejected once the version
        has ended.
        """
        one, task = self._joined(version, rank)
        piece = Upload(number, checksum, data, _future())
        one.uploads.put_nowait(piece)
        await _first(piece.written, task)

    async def loaded(self, version: int, rank: int) -> WeightsLoaded:
        """Returns once the replicas hold the version. Raises WeightsRejected."""
        return await asyncio.shield(self._joined(version, rank)[1])

    async def drop(self, version: int, rank: int) -> None:
        """Ends a rank's part of a version that has ended, so that its stage makes way for the next one at once."""
        _, task = self._ranks.pop((version, rank), (None, None))
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _joined(self, version: int, rank: int) -> tuple[UploadedRank, asyncio.Task]:
        if (found := self._ranks.get((version, rank))) is None:
            raise ValueError(f"weights {version}: rank {rank} has not joined it here; all its calls go to one gateway")
        return found


async def _first(answer: asyncio.Future, task: asyncio.Task):
    """Returns the answer, unless the rank's task ends before it: then its error is raised."""
    await asyncio.wait({answer, task}, return_when=asyncio.FIRST_COMPLETED)
    if not answer.done() and task.exception() is not None:
        raise task.exception()
    return answer.result() if answer.done() else None
