"""Fastest-of-N on simulated replicas: copies of stragglers with other draft methods where there is room (SpecActor 4).

A copy goes on where its original is, with KV from the pool as far as the pool has it and the rest computed; it makes
the same tokens (law 2). Who is first to the end of the chunk ends it for all; who is not stops after the step that
runs. A replica drafts for copies by one method at a time. Invariants: what the core has booked comes first, so copies
give way to its chunks; a race never changes what the core hears but for the time. Called by `Host`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from app.simulator.acceptance import Method
from app.simulator.chunks import Chunk, Sample
from app.simulator.decoupled import Odds
from app.simulator.fleet import Fleet
from app.simulator.replica import Replica
from policies.racing import Assignment, FastestOfN, FreeWorker, Ladder, Straggler

LOOK_S = 1.0
"""From a chunk's end to the look at what has become free: many end together, and a look costs."""


@dataclass(frozen=True)
class Racing:
    """`methods` that copies may use, by name; `own`: that of originals (None: plain); `room`: the paper's b_max."""

    policy: FastestOfN
    ladder: Ladder
    methods: Mapping[str, Method]
    own: str | None
    odds: Odds
    room: int


@dataclass
class Race:
    original: Chunk
    copies: list[Chunk] = field(default_factory=list)  # that still run
    winner: Chunk | None = None

    def methods(self, own: str | None) -> tuple[str, ...]:
        return (*((own,) if own else ()), *(copy.method for copy in self.copies))


class Races:
    """`room`: chunks that a replica surely has KV for, at most `racing.room` of them."""

    def __init__(self, racing: Racing, fleet: Fleet, room: int):
        self._racing, self._fleet = racing, fleet
        self._room = min(racing.room, room)
        self._races: dict[str, Race] = {}
        self._copies: dict[int, list[Chunk]] = {}  # by replica, as they were made
        self._ranks = [rung.method for rung in racing.ladder.ranked() if rung.method in racing.methods]

    # ---- new copies ------------------------------------------------------------------------------------

    def look(self, chunks: Iterable[Chunk], now: float) -> list[Chunk]:
        """Copies to start now of `chunks`, all that the core has running."""
        chunks = {chunk.sample.sample_id: chunk for chunk in chunks}
        workers = self._workers(chunks.values())
        if not workers:
            return []
        stragglers = [self._straggler(chunk) for chunk in chunks.values() if chunk.running and not self._won(chunk)]
        made = (
            self._copy(chunks[assigned.sample_id], assigned, now)
            for assigned in self._racing.policy.assign(stragglers, workers, self._racing.ladder)
        )
        return [copy for copy in made if copy is not None]

    def _workers(self, chunks: Iterable[Chunk]) -> list[FreeWorker]:
        """Replicas with room. One without copies gets the method that fewest draft with so far, by rank."""
        load = Counter(chunk.sample.replica.index for chunk in chunks)
        methods = {index: copies[0].method for index, copies in self._copies.items() if copies}
        used, workers = Counter(methods.values()), []
        for replica in self._fleet.up():
            copies = len(self._copies.get(replica.index, ()))
            if load[replica.index] + copies < self._room:
                method = methods.get(replica.index) or min(self._ranks, key=lambda name: used[name])
                used[method] += replica.index not in methods
                workers.append(FreeWorker(_worker_id(replica), method, load[replica.index] + copies, self._room))
        return workers

    def _straggler(self, chunk: Chunk) -> Straggler:
        racing, sample = self._racing, chunk.sample
        race = self._races.get(sample.sample_id) or Race(chunk)
        methods = race.methods(racing.own)
        accepts = racing.odds.of(racing.methods[methods[0]], sample) if methods else 0.0
        return Straggler(sample.sample_id, accepts, methods, _worker_id(sample.replica))

    def _won(self, chunk: Chunk) -> bool:
        race = self._races.get(chunk.sample.sample_id)
        return race is not None and race.winner is not None

    def _copy(self, chunk: Chunk, assigned: Assignment, now: float) -> Chunk | None:
        """None where nothing is left to make. Its sample is a shadow of the original's as it is now."""
        sample, (done, steps) = chunk.sample, chunk.sample.replica.progress(chunk, now)
        if done == chunk.tokens:
            return None
        shadow = Sample(sample.family, sample.index, now)
        shadow.begun, shadow.replica, shadow.chunks = True, self._fleet.replicas[int(assigned.worker_id)], sample.chunks
        shadow.made, shadow.stored = sample.made + done, sample.stored
        shadow.verifications = sample.verifications + chunk.part * steps
        shadow.drafted = sample.drafted + (chunk.cost - chunk.part) * steps
        name = f"{chunk.chunk_id}/{assigned.method}"
        copy = Chunk(name, shadow, chunk.tokens - done, chunk.expected_tokens, chunk.class_starts)
        copy.method = assigned.method
        self._races.setdefault(sample.sample_id, Race(chunk)).copies.append(copy)
        self._copies.setdefault(shadow.replica.index, []).append(copy)
        return copy

    # ---- ends ------------------------------------------------------------------------------------------

    def stopped(self, chunk: Chunk) -> list[Chunk]:
        """A chunk has left its replica. Returns those that need not run on; an original that was beaten takes over
        what the winner has made."""
        race = self._races.get(chunk.sample.sample_id)
        if chunk.method is not None:
            self._copies[chunk.sample.replica.index].remove(chunk)
            if race is None or chunk not in race.copies:
                return []
            race.copies.remove(chunk)
            if chunk.aborted or race.winner is not None:
                return []
            race.winner = chunk
            return [other for other in (race.original, *race.copies) if not (other.over or other.aborted)]
        if race is None:
            return []
        del self._races[chunk.sample.sample_id]
        if race.winner is not None:
            _take_over(chunk, race.winner)
        return [copy for copy in race.copies if not copy.aborted]

    def in_the_way(self, replica: Replica) -> list[Chunk]:
        """Copies that must go since the core has started a chunk there, the newest first."""
        over = len(replica.running) + len(replica.waiting) - self._room
        copies = [copy for copy in self._copies.get(replica.index, ()) if not copy.aborted]
        return copies[max(0, len(copies) - over) :] if over > 0 else []

    def busy(self) -> set[int]:
        """Indexes of replicas with copies."""
        return {index for index, copies in self._copies.items() if copies}


def _take_over(original: Chunk, winner: Chunk) -> None:
    sample, shadow = original.sample, winner.sample
    original.made, original.aborted, original.mark = float(original.tokens), False, winner.mark
    sample.verifications, sample.drafted = shadow.verifications, shadow.drafted


def _worker_id(replica: Replica) -> str:
    return f"{replica.index:06d}"
