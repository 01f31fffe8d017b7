"""The trail of each sample: its chunks with their replicas, reasons and ends, and the faults on the way.

Filled from the events that the core takes and the actions that it returns. Invariant: memory is bounded, per sample, by
number of ended samples, and by number of faults. Nothing here decides anything. Called by `Rollouts`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from tailrace.policies.protocol import actions as ac
from tailrace.policies.protocol import events as ev

KEPT_CHUNKS = 100
"""Maximum number of chunks kept per sample, the newest."""

KEPT_ENDED = 2_000
"""Maximum number of ended samples kept, the newest: about 2 MB."""

KEPT_FAULTS = 100


class TrailChunk:
    """One chunk. Times are the coordinator's; `ended_s`: None while it runs. `end`: stop, length, aborted, failed or
    lost; `asked`: why it was asked to stop. `counts`: False if another one of its race gave the sample its tokens."""

    __slots__ = ("asked", "began_s", "chunk_id", "copy_of", "counts", "end", "ended_s", "error", "method", "new_tokens",
                 "reason", "replica_id", "start")  # fmt: skip

    def __init__(self, began_s: float, action: ac.StartChunk):
        self.began_s, self.chunk_id, self.replica_id = began_s, action.chunk_id, action.replica_id
        self.start, self.reason, self.copy_of, self.method = action.start, action.reason, action.copy_of, action.method
        self.ended_s: float | None = None
        self.end = self.error = self.asked = ""
        self.new_tokens, self.counts = 0, True


class Trail:
    """Trail of one sample. `chunks`: the newest, after `dropped` earlier ones, copies included. `end`: empty until it
    has ended.
    """

    __slots__ = ("chunks", "dropped", "end", "ended_s", "error", "reason")

    def __init__(self):
        self.chunks: list[TrailChunk] = []
        self.dropped = 0
        self.end = self.reason = self.error = ""
        self.ended_s: float | None = None

    def add(self, chunk: TrailChunk) -> None:
        self.chunks.append(chunk)
        if len(self.chunks) > KEPT_CHUNKS:
            del self.chunks[0]
            self.dropped += 1

    @property
    def moves(self) -> int:
        """Number of times that its next chunk was on another replica than the one before; copies do not count."""
        places = [chunk.replica_id for chunk in self.chunks if chunk.copy_of is None]
        return sum(before != after for before, after in pairwise(places))


class TrailFault(NamedTuple):
    """`number`: grows by one. `sample_id`: empty for a fault of a replica."""

    number: int
    at_s: float
    sample_id: str
    replica_id: str
    text: str


class Trails:
    """`now`: the coordinator's clock, in seconds."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._live: dict[str, Trail] = {}  # trails of samples that have had a chunk, by id
        self._ended: OrderedDict[str, Trail] = OrderedDict()
        self._running: dict[str, TrailChunk] = {}
        self.faults: deque[TrailFault] = deque(maxlen=KEPT_FAULTS)
        self._faults = 0

    @property
    def unended(self) -> int:
        """Number of samples and chunks that have not ended."""
        return len(self._live) + len(self._running)

    def get(self, sample_id: str) -> Trail | None:
        return self._live.get(sample_id) or self._ended.get(sample_id)

    def running(self, sample_id: str) -> TrailChunk | None:
        """Returns the chunk that the sample runs, not a copy; None if it runs none."""
        trail = self._live.get(sample_id)
        chunks = trail.chunks if trail is not None else ()
        return next((one for one in reversed(chunks) if one.ended_s is None and one.copy_of is None), None)

    def of_batch(self, core_id: str) -> Iterator[tuple[str, Trail]]:
        """Yields the trails of a batch's samples, by its id in the core: those that have ended first."""
        prefix = f"{core_id}/"
        for trails in (self._ended, self._live):
            yield from ((name, trail) for name, trail in trails.items() if name.startswith(prefix))

    def ended_batches(self) -> list[str]:
        """Returns the ids, in the core, of the batches of ended samples that are kept, last ended ones first."""
        return list(dict.fromkeys(name.partition("/")[0] for name in reversed(self._ended)))

    def forget_live(self) -> None:
        """Drops all running samples and chunks: the core has begun anew."""
        self._live.clear()
        self._running.clear()

    # ---- events and actions -----------------------------------------------------------------------

    def observe(self, event: ev.Event, counts: bool = True) -> None:
        """Records an event that the core has taken. Kinds that do not concern a chunk are ignored. `counts`: False for
        the end of a chunk whose tokens do not count for its sample.
        """
        if not counts and (chunk := self._running.get(event.chunk_id)) is not None:
            chunk.counts = False
        if (noted := _EVENTS.get(type(event))) is not None:
            noted(self, event)

    def act(self, action: ac.Action) -> None:
        """Records an action of the core."""
        if (noted := _ACTIONS.get(type(action))) is not None:
            noted(self, action)

    def _finished(self, event: ev.ChunkFinished) -> None:
        if (chunk := self._running.pop(event.chunk_id, None)) is not None:
            chunk.ended_s, chunk.end, chunk.new_tokens = event.now, event.end.value, event.new_tokens

    def _failed(self, event: ev.ChunkFailed) -> None:
        if (chunk := self._running.pop(event.chunk_id, None)) is not None:
            chunk.ended_s, chunk.end, chunk.error = event.now, "failed", event.error
            self._fault(event.now, _sample_of(event.chunk_id), chunk.replica_id, event.error)

    def _left(self, event: ev.ReplicaLeft) -> None:
        lost = [chunk for chunk in self._running.values() if chunk.replica_id == event.replica_id]
        for chunk in lost:
            del self._running[chunk.chunk_id]
            chunk.ended_s, chunk.end, chunk.error = event.now, "lost", event.error
        chunks = f", with {len(lost)} chunks" if lost else ""
        self._fault(event.now, "", event.replica_id, f"it has left{chunks}: {event.error}")

    def _started(self, action: ac.StartChunk) -> None:
        chunk = self._running[action.chunk_id] = TrailChunk(self._now(), action)
        if (trail := self._live.get(action.sample_id)) is None:
            trail = self._live[action.sample_id] = Trail()
        trail.add(chunk)

    def _aborting(self, action: ac.AbortChunk) -> None:
        if (chunk := self._running.get(action.chunk_id)) is not None:
            chunk.asked = action.reason

    def _over(self, action: ac.EndSample) -> None:
        trail = self._live.pop(action.sample_id, None) or Trail()
        trail.end, trail.reason, trail.error = action.end.value, action.reason, action.error or ""
        trail.ended_s = self._now()
        self._ended[action.sample_id] = trail
        if len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)
        if action.error:
            self._fault(trail.ended_s, action.sample_id, "", f"it is given up: {action.error}")

    def _fault(self, at_s: float, sample_id: str, replica_id: str, text: str) -> None:
        self._faults += 1
        self.faults.append(TrailFault(self._faults, at_s, sample_id, replica_id, text))


def _sample_of(chunk_id: str) -> str:
    return chunk_id.rpartition(":")[0]


_EVENTS = {ev.ChunkFinished: Trails._finished, ev.ChunkFailed: Trails._failed, ev.ReplicaLeft: Trails._left}
_ACTIONS = {
    ac.StartChunk: Trails._started,
    ac.AbortChunk: Trails._aborting,
    ac.EndSample: Trails._over,
}
