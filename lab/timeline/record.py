"""The record of a run by its journal: chunks, samples, races and lifetimes of replicas. Its clock starts at the first
submission and stops as the last sample ends.

Kinds of entries without a handler here do not concern a timeline. In a single batch, samples are named within the
batch. `tailrace timeline` calls it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from tailrace.lab.simulator.types import Moment, SimulatedRun
from tailrace.lab.timeline.chunks import RecordedChunk, RecordedRace, RecordedSample, ReplicaLifetime
from tailrace.lab.timeline.entries import Entry, entries
from tailrace.lab.timeline.replica_lifetimes import ReplicaLifetimes


@dataclass(frozen=True, slots=True)
class Record:
    """A run as it went. Replicas are numbers: places in `names` and `lifetimes`, in the order of joining. Batches are
    places in `batches`, in the order of submission.

    `asked`: (seconds, wanted replicas, reason). `weights`: (seconds, version), from the first submission. `dropped`:
    entries that the journal does not hold.
    """

    run: SimulatedRun
    batches: tuple[str, ...]
    names: tuple[str, ...]
    lifetimes: tuple[tuple[ReplicaLifetime, ...], ...]
    samples: dict[str, RecordedSample]
    chunks: tuple[RecordedChunk, ...]
    races: tuple[RecordedRace, ...]
    asked: tuple[tuple[float, int, str], ...]
    weights: tuple[tuple[float, int], ...]
    dropped: int


def record(lines: Iterable[str]) -> Record:
    """Returns the record of a journal. Raises ValueError that names the line: no journal, no submission, an entry
    without a needed field, or one about an unknown id.
    """
    reading = _Reading()
    for entry in entries(lines):
        try:
            reading.take(entry)
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"line {entry.line}: {entry.kind}: does not fit the entries before it: {error}") from error
    return reading.finished()


class _Reading:
    def __init__(self):
        self._zero: float | None = None  # time of the first submission
        self._now, self._taken, self._dropped = 0.0, 0, 0
        self._lifetimes = ReplicaLifetimes()
        self._looks: dict[int, tuple[float, float]] = {}  # times of the last two reports, by replica
        self._samples: dict[str, RecordedSample] = {}
        self._batches: list[str] = []
        self._sizes: Counter = Counter()  # samples by group
        self._made: list[RecordedChunk] = []
        self._chunks: dict[str, RecordedChunk] = {}  # by id; a new copy may have the id of an aborted one
        self._running: dict[str, RecordedChunk] = {}
        self._races: dict[str, RecordedRace] = {}
        self._copies_count = True  # a copy may win: not at exactness law
        self._chunks_of: dict[str, set[str]] = {}  # running chunks of each sample, but for those that only have to stop
        self._held: set[str] = set()  # samples between two turns
        self._unended = 0
        self._weights: list[tuple[float, int]] = []
        self._moments: list[Moment] = []

    def take(self, entry: Entry) -> None:
        if self._zero is None and entry.kind == "SamplesSubmitted":
            self._zero = entry.now
        self._now = 0.0 if self._zero is None else max(self._now, entry.now - self._zero)
        self._taken += 1
        handler = _HANDLERS.get(entry.kind)
        if handler is not None:
            handler(self, entry.fields)
        if entry.kind not in _UNSETTLED and (handler is not None or entry.kind == "Tick"):
            self._note_moment()

    def _note_moment(self) -> None:
        running = len(self._chunks_of)
        waiting = self._unended - running - len(self._held)
        seen = Moment(self._now, running, waiting, 0, len(self._lifetimes.up))
        if self._moments and self._moments[-1].at_s == self._now:
            self._moments.pop()
        if not self._moments or self._moments[-1][1:] != seen[1:]:
            self._moments.append(seen)

    # ---- replicas --------------------------------------------------------------------------------

    def _header(self, header) -> None:
        self._dropped, self._copies_count = header.dropped, header.exactness == "bits"
        self._weights.append((0.0, header.weights_version))

    def _joined(self, event) -> None:
        self._lifetimes.join(event.replica_id, self._now)

    def _left(self, event) -> None:
        number = self._lifetimes.names[event.replica_id]
        for chunk in [chunk for chunk in self._running.values() if chunk.replica == number]:
            self._lose(chunk, "lost", event.error)
        self._lifetimes.leave(number, self._now)

    def _set_replicas(self, action) -> None:
        self._lifetimes.asked.append((self._now, action.replicas, action.reason))

    def _changed_weights(self, event) -> None:
        self._weights = [one for one in self._weights if one[0] < self._now] + [(self._now, event.version)]

    # ---- samples and their chunks ----------------------------------------------------------------

    def _submitted(self, event) -> None:
        if event.batch_id not in self._batches:
            self._batches.append(event.batch_id)
        batch = self._batches.index(event.batch_id)
        for group in event.groups:
            name = group["group_id"]
            for _ in range(group["samples"]):  # samples of an open group come in several events
                sample = RecordedSample(batch, group["prompt_tokens"], self._now, max_tokens=group.get("max_tokens", 0))
                self._samples[f"{name}#{self._sizes[name]}"] = sample
                self._sizes[name] += 1
            self._unended += group["samples"]

    def _turn_ended(self, action) -> None:
        self._samples[action.sample_id].holds.append((self._now, inf))
        self._held.add(action.sample_id)
        self._chunks_of.pop(action.sample_id, None)

    def _returned(self, event) -> None:
        self._samples[event.sample_id].prompt_tokens += event.outside_tokens
        self._release(event.sample_id)

    def _release(self, sample_id: str) -> None:
        """Ends the sample's time between two turns, if it is held."""
        if sample_id in self._held:
            self._held.remove(sample_id)
            holds = self._samples[sample_id].holds
            holds[-1] = (holds[-1][0], self._now)

    def _started(self, action) -> None:
        sample, number = self._samples[action.sample_id], self._lifetimes.names[action.replica_id]
        raced = getattr(action, "copy_of", None)
        chunk = RecordedChunk(
            chunk_id=action.chunk_id,
            sample_id=action.sample_id,
            replica=number,
            begin_s=self._now,
            start=action.start,
            context_tokens=sample.prompt_tokens + action.start,
            reason=action.reason,
            method=getattr(action, "method", None),
            weights_version=getattr(action, "weights_version", 0),
            expected_tokens=getattr(action, "expected_tokens", 0),
        )
        if raced in self._chunks:
            self._enter(chunk, self._chunks[raced])
        else:
            sample.moves += sample.where not in (None, number)
            sample.where = number
        sample.chunks.append(chunk)
        self._made.append(chunk)
        self._chunks[action.chunk_id] = self._running[action.chunk_id] = chunk
        self._chunks_of.setdefault(action.sample_id, set()).add(action.chunk_id)
        self._lifetimes.start(number, self._now)

    def _enter(self, chunk: RecordedChunk, first: RecordedChunk) -> None:
        name = first.race or first.chunk_id  # a copy that replaced the original may be copied too
        first.race = chunk.race = name
        self._races.setdefault(name, RecordedRace([first], first)).runners.append(chunk)

    def _measured(self, event) -> None:
        """Records the time of a replica's report, which has the progress of all chunks there."""
        self._look_at(self._lifetimes.names[event.replica_id], event.performance["observed_at"])

    def _streamed(self, event) -> None:
        running = [(self._running[name], n) for name, n in event.tokens.items() if name in self._running]
        for chunk, tokens in running:
            before_s = self._look_at(chunk.replica, event.observed_at)
            if tokens and not chunk.seen:
                chunk.seen = True
                chunk.silent_s = max(chunk.begin_s, before_s)

    def _look_at(self, number: int, observed_at: float) -> float:
        """Records the time of a replica's report. Returns the time of the report before that."""
        before_s, last_s = self._looks.get(number, (0.0, 0.0))
        at_s = 0.0 if self._zero is None else max(0.0, observed_at - self._zero)
        if at_s > last_s:
            before_s, last_s = self._looks[number] = last_s, at_s
        return before_s

    def _aborting(self, action) -> None:
        self._lifetimes.abort(action.replica_id, self._now)
        if (chunk := self._running.get(action.chunk_id)) is not None:
            chunk.error, chunk.stopping = action.reason, True

    def _finished_chunk(self, event) -> None:
        chunk = self._running.get(event.chunk_id)
        if chunk is None:  # a copy whose race was over
            return
        chunk.count(event)
        self._stop(chunk, event.end, chunk.error)
        race = self._races.get(chunk.race)
        may_win = chunk.end != "aborted" and self._copies_count
        if race is not None and race.winner is None and (chunk is race.original or may_win):
            race.winner = chunk
            self._beat(race)
            self._samples[chunk.sample_id].where = chunk.replica

    def _failed(self, event) -> None:
        if event.chunk_id in self._running:
            self._lose(self._running[event.chunk_id], "failed", event.error)

    def _lose(self, chunk: RecordedChunk, end: str, error: str) -> None:
        self._stop(chunk, end, error)
        race = self._races.get(chunk.race)
        if race is not None and chunk is race.original:
            heirs = (one for one in race.runners if self._running.get(one.chunk_id) is one and not one.stopping)
            race.original = next(heirs, None) if self._copies_count else None
            if race.original is None:
                self._beat(race)

    def _beat(self, race: RecordedRace) -> None:
        """Records that the runners of a race that still run only have to stop."""
        for runner in race.runners:
            runner.beaten_s = self._now
        self._chunks_of.pop(race.runners[0].sample_id, None)

    def _stop(self, chunk: RecordedChunk, end: str, error: str = "") -> None:
        chunk.end_s, chunk.end, chunk.error = self._now, end, error
        if not chunk.seen:
            chunk.silent_s = max(chunk.begin_s, self._looks.get(chunk.replica, (0.0, 0.0))[1])
        self._lifetimes.stop(chunk.replica, self._now)
        del self._running[chunk.chunk_id]
        left = self._chunks_of.get(chunk.sample_id, set())  # none: its race, turn or sample is over
        left.discard(chunk.chunk_id)
        if not left:
            self._chunks_of.pop(chunk.sample_id, None)

    def _ended(self, action) -> None:
        sample = self._samples[action.sample_id]
        sample.ended_s, sample.end = self._now, action.end
        self._unended -= 1
        self._release(action.sample_id)
        self._chunks_of.pop(action.sample_id, None)

    # ---- the whole -------------------------------------------------------------------------------

    def finished(self) -> Record:
        if self._zero is None:
            raise ValueError("no samples were ever submitted")
        for chunk in list(self._running.values()):
            self._stop(chunk, "running")
        ends = [sample.ended_s for sample in self._samples.values()]
        until_s = self._now if None in ends else max(ends)
        for chunk in self._made:
            chunk.begin_s, chunk.silent_s = min(chunk.begin_s, until_s), min(chunk.silent_s, until_s)
            chunk.end_s = min(chunk.end_s, until_s)
        for race in self._races.values():
            for runner in race.runners:
                if race.winner is not None or (runner.is_copy and not self._copies_count):
                    runner.won = runner is race.winner
        self._shorten()
        chunks = tuple(self._made)
        return Record(
            run=self._run(chunks, until_s),
            batches=tuple(self._batches),
            names=tuple(self._lifetimes.names),
            lifetimes=self._lifetimes.until(until_s),
            samples=self._samples,
            chunks=chunks,
            races=tuple(self._races.values()),
            asked=tuple(self._lifetimes.asked),
            weights=tuple(one for one in self._weights if one[0] <= until_s),
            dropped=self._dropped,
        )

    def _shorten(self) -> None:
        prefix = f"{self._batches[0]}/" if len(self._batches) == 1 else ""
        self._samples = {name.removeprefix(prefix): sample for name, sample in self._samples.items()}
        for chunk in self._made:
            chunk.sample_id = chunk.sample_id.removeprefix(prefix)

    def _run(self, chunks: tuple[RecordedChunk, ...], until_s: float) -> SimulatedRun:
        spans = tuple(span for chunk in chunks for span in chunk.spans())
        ended = tuple(sample.as_ended(name) for name, sample in self._samples.items() if sample.ended_s is not None)
        moments = tuple(moment for moment in self._moments if moment.at_s <= until_s)
        return SimulatedRun(
            system="run",
            workload=", ".join(self._batches),
            seed=0,
            makespan_s=until_s,
            ended=ended,
            moments=moments,
            spans=spans,
            events=self._taken,
            bounds={},
        )


_UNSETTLED = ("ChunkFinished", "ChunkFailed")
"""Names of events after which a sample whose chunk has ended neither waits nor has ended until the next tick."""

_HANDLERS = {
    "journal": _Reading._header,
    "SamplesSubmitted": _Reading._submitted,
    "SampleReturned": _Reading._returned,
    "ReplicaJoined": _Reading._joined,
    "ReplicaLeft": _Reading._left,
    "SetReplicas": _Reading._set_replicas,
    "WeightsChanged": _Reading._changed_weights,
    "StartChunk": _Reading._started,
    "ReplicaMeasured": _Reading._measured,
    "TokensStreamed": _Reading._streamed,
    "AbortChunk": _Reading._aborting,
    "ChunkFinished": _Reading._finished_chunk,
    "ChunkFailed": _Reading._failed,
    "EndTurn": _Reading._turn_ended,
    "EndSample": _Reading._ended,
}
