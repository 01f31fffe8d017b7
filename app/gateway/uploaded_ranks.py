"""Ranks of a trainer without Ray, which upload what they hold: the gateway writes it into its node's shared memory.

A rank's part of a version is one task here, `PublishingRank.publish`, whose values come with requests: a piece's bytes
in order, in as many bodies as the rank chooses, or as deltas on weights that this node holds. Invariants: a byte is
taken once, a piece with the rank's own checksum, and a part of a body that is refused changes nothing; no wait for
bytes is longer than the ranks' limit. All ranks of a version use one gateway.
"""

import asyncio
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.publishing_rank import Held, PublishingRank, this_node
from tailrace.deployments.messages.pieces import PieceEnd, PublishPhase, RankPart, RankPlan
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.staging.base_weights import BaseWeights
from tailrace.deployments.staging.deltas import applied, bytes_given
from tailrace.deployments.staging.piece_files import PieceFiles, bytes_of
from tailrace.deployments.staging.slots import Slots
from tailrace.deployments.staging.stage import StageRefused, room_for


@dataclass(frozen=True)
class Upload:
    """Bytes of a piece that have come: the piece's number in the rank's part, and where in the piece they begin.
    `checksum`: of the whole piece. `is_delta`: the data give these bytes on those of the base.
    """

    number: int
    begin: int
    checksum: str
    data: bytes | memoryview
    is_delta: bool = False


def uploads_of(
    body: memoryview,
    numbers: list[int],
    checksums: list[str],
    begins: list[int] | None,
    deltas: list[bool] | None,
    sizes: list[int] | None,
) -> list[Upload]:
    """Returns the parts of a request. Raises StageRefused, one line, if they do not fit each other or the body."""
    count = len(numbers)
    begins, deltas = begins or [0] * count, deltas or [False] * count
    sizes = [len(body)] if sizes is None and count == 1 else sizes or []
    if any(len(each) != count for each in (checksums, begins, deltas, sizes)) or min(begins + sizes) < 0:
        raise StageRefused(f"a request of {count} parts: give number, checksum, begin, delta and size of each")
    if sum(sizes) != len(body):
        raise StageRefused(f"the parts of a request have {sum(sizes):,} bytes, and its body has {len(body):,}")
    ends = accumulate(sizes)
    data = [body[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return list(map(Upload, numbers, begins, checksums, data, deltas))


class UploadPlan(NamedTuple):
    """The numbers of the pieces to upload, and whether deltas on the rank's base are taken."""

    pieces: tuple[int, ...]
    deltas: bool


def _future() -> asyncio.Future:
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True)
class UploadedRank(PublishingRank):
    """`base`: version and digest of the weights that the rank can make deltas on, or None. `planned`: the UploadPlan,
    once all ranks have joined. `uploads`: each with a future that is set once it is written. `came`: bytes that are
    written of each piece that is not whole yet. `ends`: of whole pieces.
    """

    part: RankPart
    base: tuple[int, str] | None
    planned: asyncio.Future = field(default_factory=_future)
    uploads: asyncio.Queue = field(default_factory=asyncio.Queue)
    came: dict[int, int] = field(default_factory=dict)
    ends: dict[int, PieceEnd] = field(default_factory=dict)

    def check_whole(self) -> None:
        """Raises StageRefused if bytes of a piece have not come."""
        for number, came in self.came.items():
            raise StageRefused(f"{self._named(number)}, has {self._size(number):,} bytes, and {came:,} have come")

    async def _stage(self, slots: Slots, plan: RankPlan, pieces: Held) -> tuple[PieceEnd, ...]:
        base = await asyncio.to_thread(_base_of, slots, self.base, plan)
        self.came.update(dict.fromkeys(plan.written, 0))
        self.planned.set_result(UploadPlan(plan.written, base is not None))
        with closing(await asyncio.to_thread(PieceFiles, slots.part, plan.tensors)) as files:
            while self.came:
                one, written = await self._next_upload()
                try:
                    if one.number not in self.ends:
                        await self._take(files, slots, await self._as_bytes(one, base))
                except (StageRefused, OSError) as error:
                    written.set_exception(error)
                else:
                    written.set_result(None)
        return tuple(map(self.ends.__getitem__, plan.written))

    async def _next_upload(self) -> tuple[Upload, asyncio.Future]:
        """Waits for bytes. Raises WeightsRejected if the version has ended, StageRefused if none come."""
        try:
            async with asyncio.timeout(self.part.timeout_s):
                return await self.uploads.get()
        except TimeoutError:
            await self._call(PublishPhase.RENEW)
            raise StageRefused(f"no piece has come for {self.part.timeout_s:g} s") from None

    async def _as_bytes(self, one: Upload, base: BaseWeights | None) -> Upload:
        """Returns an upload with the bytes that its delta gives. Raises StageRefused."""
        if not one.is_delta:
            return one
        self._check_place(one)
        if base is None:
            raise StageRefused(f"{self._named(one.number)}: deltas are not taken, as the answer to join says")
        try:
            size = bytes_given(one.data)
            self._check_end(one, size)
            data = await asyncio.to_thread(self._given, one, base, size)
        except StageRefused:
            raise
        except ValueError as error:
            raise StageRefused(f"{self._named(one.number)}: {error}") from error
        return replace(one, data=data, is_delta=False)

    def _given(self, one: Upload, base: BaseWeights, size: int) -> memoryview:
        return applied(base.read(self.part.pieces[one.number], one.begin, size), one.data)

    async def _take(self, files: PieceFiles, slots: Slots, one: Upload) -> None:
        came, size = self._check_place(one), self._size(one.number)
        end = self._check_end(one, len(one.data))
        await asyncio.to_thread(self._put, files, slots, one, came)
        self.came[one.number] = max(came, end)
        if self.came[one.number] == size:
            del self.came[one.number]
            self.ends[one.number] = PieceEnd(one.checksum)

    def _check_place(self, one: Upload) -> int:
        """Returns how many bytes of its piece are written. Raises StageRefused if these do not go on from there."""
        if (came := self.came.get(one.number)) is None:
            where = f"weights {self.version}: rank {self.rank}: piece {one.number}"
            raise StageRefused(f"{where} is not to be uploaded; those are in the answer to join")
        if one.begin > came:
            there = f"bytes from {one.begin:,} on have come, and those from {came:,} on have not"
            raise StageRefused(f"{self._named(one.number)}: {there}")
        return came

    def _check_end(self, one: Upload, given: int) -> int:
        """Returns where in the piece the given bytes end. Raises StageRefused if that is outside."""
        size, end = self._size(one.number), one.begin + given
        if end > size:
            raise StageRefused(f"{self._named(one.number)}, has {size:,} bytes, and {end:,} have come")
        return end

    def _put(self, files: PieceFiles, slots: Slots, one: Upload, came: int) -> None:
        """Writes the bytes from `came` on; those before are in place."""
        piece = self.part.pieces[one.number]
        with room_for(slots, f"weights {self.version}: {piece} needs {self._size(one.number):,} bytes"):
            files.write(piece, memoryview(one.data)[came - one.begin :], came)

    def _named(self, number: int) -> str:
        return f"weights {self.version}: rank {self.rank}: piece {number}, {self.part.pieces[number]}"

    def _size(self, number: int) -> int:
        return bytes_of(self.part.pieces[number])


class UploadedRanks:
    """The ranks that this gateway writes for, by version and rank."""

    def __init__(self):
        self._ranks: dict[tuple[int, int], tuple[UploadedRank, asyncio.Task[WeightsLoaded]]] = {}

    async def join(
        self, client: RolloutClient, version: int, rank: int, part: RankPart, base: tuple[int, str] | None
    ) -> UploadPlan:
        """Returns what to upload, once all ranks have joined. `base`: see UploadedRank. Raises WeightsRejected."""
        self._ranks = {name: one for name, one in self._ranks.items() if name[0] >= version or not one[1].done()}
        one = UploadedRank(client=client, version=version, rank=rank, node=this_node(), part=part, base=base)
        task = asyncio.create_task(one.publish(part, [(piece, None) for piece in part.pieces], lambda: None))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # a rank may never ask for it
        self._ranks[version, rank] = one, task
        return await _first(one.planned, task)

    async def upload(self, version: int, rank: int, upload: Upload) -> None:
        """Writes bytes of a piece. Raises StageRefused, one line, for those that do not fit, WeightsRejected once the
        version has ended.
        """
        one, task = self._joined(version, rank)
        if upload.number not in one.ends:
            written = _future()
            one.uploads.put_nowait((upload, written))
            await _first(written, task)

    async def loaded(self, version: int, rank: int) -> WeightsLoaded:
        """Returns once the replicas hold the version. Raises StageRefused, one line, if pieces lack bytes, and
        WeightsRejected.
        """
        one, task = self._joined(version, rank)
        if not task.done():
            one.check_whole()
        return await asyncio.shield(task)

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


def _base_of(slots: Slots, base: tuple[int, str] | None, plan: RankPlan) -> BaseWeights | None:
    """Returns the weights that deltas are made on, if a slot of this node has them, with all tensors of the plan."""
    if base is None or (folder := slots.held().get(base)) is None:
        return None
    found = BaseWeights(folder)
    return found if found.has(plan.tensors) else None


async def _first(answer: asyncio.Future, task: asyncio.Task):
    """Returns the answer, unless the rank's task ends before it: then its error is raised."""
    await asyncio.wait({answer, task}, return_when=asyncio.FIRST_COMPLETED)
    if not answer.done() and task.exception() is not None:
        raise task.exception()
    return answer.result() if answer.done() else None
