"""Weights from every rank of a trainer: each stages what it holds, and the service loads the whole.

    loaded = tailrace.weights.publish(7, model)       # on all ranks, FSDP2 or tensor-parallel; nothing is gathered
    publishing = tailrace.weights.begin(8, model)     # returns once this rank's tensors may change
    loaded = publishing.wait()

Invariant: ranks meet through the service alone, never in a collective, and every wait has a limit. A rank that is lost
ends its version on all ranks, and the service keeps its weights.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from queue import Queue

from tailrace.app.calls.blocking import blocking
from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import WeightsRejected
from tailrace.app.cluster import connect
from tailrace.app.weights.held_pieces import HeldPiece, held_pieces
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.pieces import PieceEnd, PublishPhase, RankPart, RankPlan, StagedPiece
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.deployments.messages.scores import Score
from tailrace.deployments.staging.piece_files import PieceFiles, checksum_of_piece
from tailrace.deployments.staging.slots import AlreadyStaging, MemorySource, Slots
from tailrace.deployments.staging.stage import Stage, StageRefused, as_bytes, room_for

TIMEOUT_S = 120.0
"""Maximum seconds for all ranks to join, again for all to stage, and for the leader to seal. Ranks end a step together,
and a rank stages some GB a second.
"""

LOAD_S = 1200.0
"""Maximum seconds for the replicas to check and then to load, beyond the ranks' own phases."""


FETCH_S = 60.0
"""Maximum seconds to fetch one piece from another node."""


def publish(version: int, held: object, **settings) -> WeightsLoaded:
    """Publishes a version from all ranks, each with what it holds; to be called on every rank. Returns once the
    replicas hold it. `settings` and errors: those of `begin`, and of `Publishing.wait`.
    """
    return begin(version, held, **settings).wait()


def begin(
    version: int,
    held: object,
    *,
    client: RolloutClient | None = None,
    group: object = None,
    score: Score = (),
    timeout_s: float = TIMEOUT_S,
) -> "Publishing":
    """Stages what this rank holds. Returns once its tensors may change; the rest goes on behind it.

    `held`: a model, a state dict or (name, tensor) pairs, by the names of a saved folder: DTensors, `Slice`s, or whole
    tensors, which ranks may have in common. `client`: by default a new one. `group`: the ranks that publish, a process
    group; by default all of torch.distributed, or this process alone without it. `score`: see `client.update_weights`;
    one rank's is enough. `timeout_s`: see TIMEOUT_S. Raises StageRefused, one line, for a tensor that cannot be staged.
    """
    rank, world_size = _place(group)
    ours = PublishingRank(client or connect(), version, rank, this_node())
    try:
        pieces = held_pieces(held)
    except Exception as error:  # of this rank: the others have to hear of it, and it is raised again
        blocking(ours.give_up)(error)
        raise
    part = RankPart(
        world_size=world_size,
        node="",
        leads=False,
        timeout_s=timeout_s,
        pieces=tuple(one.piece for one in pieces),
        score=tuple(score),
    )
    return Publishing(ours, part, pieces)


class Publishing:
    """A version that this rank publishes, on a thread. `staged_s`: seconds in which its tensors had to stay."""

    def __init__(self, rank: "PublishingRank", part: RankPart, pieces: list[HeldPiece]):
        self._result: Queue = Queue(1)
        began_s, staged = time.monotonic(), threading.Event()
        work = rank.publish(part, pieces, staged.set)
        threading.Thread(target=self._run, args=(work, staged), daemon=True, name="publish").start()
        staged.wait()
        self.staged_s = time.monotonic() - began_s

    def wait(self) -> WeightsLoaded:
        """Returns once the replicas hold the version. Raises WeightsRejected, one line, on every rank, if it has ended;
        the service then keeps its weights.
        """
        loaded, error = result = self._result.get()
        self._result.put(result)
        if error is not None:
            raise error
        return loaded.model_copy(update={"staged_s": self.staged_s})

    def _run(self, work: Coroutine, staged: threading.Event) -> None:
        try:
            self._result.put((asyncio.run(work), None))
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: raised again in the caller's
            self._result.put((None, error))
        finally:
            staged.set()


@dataclass(frozen=True)
class PublishingRank:
    """The calls of one rank for one version."""

    client: RolloutClient
    version: int
    rank: int
    node: str

    async def publish(self, part: RankPart, pieces: list[HeldPiece], staged: Callable[[], None]) -> WeightsLoaded:
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

    async def _publish(self, part: RankPart, pieces: list[HeldPiece], staged: Callable[[], None]) -> WeightsLoaded:
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
                ends = await asyncio.to_thread(self._ship if plan.ships else self._write, slots, plan, pieces)
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

    def _call(self, phase: PublishPhase, content: object = None) -> Awaitable:
        return self.client.publishing.run(phase, self.version, self.rank, content)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(Exception):  # the service is unreachable; the call under way raises
                await self._call(PublishPhase.RENEW)

    def _write(self, slots: Slots, plan: RankPlan, pieces: list[HeldPiece]) -> tuple[PieceEnd, ...]:
        """Writes the pieces of the plan to their places."""
        ends = []
        with contextlib.closing(PieceFiles(slots.part, plan.tensors)) as files:
            for piece, values in map(pieces.__getitem__, plan.written):
                _, _, data = as_bytes(str(piece), values)
                with room_for(slots, f"weights {self.version}: {piece} needs {len(data):,} bytes"):
                    files.write(piece, data)
                ends.append(PieceEnd(checksum_of_piece(piece, data)))
        return tuple(ends)

    def _ship(self, slots: Slots, plan: RankPlan, pieces: list[HeldPiece]) -> tuple[PieceEnd, ...]:
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


def _place(group: object) -> tuple[int, int]:
    """Returns this process's rank and the number of ranks."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


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
