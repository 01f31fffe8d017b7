"""Races: copies of running chunks where replicas have room, each with another draft method (SpecActor 4.2).

A copy makes the tokens of its original, by the same noise (law 2). Who is first to the chunk's end is the chunk; the
others stop, and what they have made counts for nobody. A copy continues alone when its original's replica is lost.
Invariant: copies take room only while no sample waits for any. Called by `RolloutCore` alone.
"""

from collections import Counter

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.families.racing import FreeWorker, Racing, Straggler
from tailrace.policies.protocol.events import ChunkEnd, ChunkFinished
from tailrace.policies.protocol.views import RacesView

LOOK_S = 1.0
"""Between two looks at what is free: many chunks end together, and a look reads the books of every replica."""


class Races:
    def __init__(self, policy: Racing, table: ReplicaTable, running: RunningChunks):
        self._policy, self._table, self._running = policy, table, running
        self._looked_at = float("-inf")
        self._gains: dict[tuple[tuple[str, ...], float], float] = {}  # by methods and acceptance

    # ---- who is first ------------------------------------------------------------------------------

    def won(self, chunk: Chunk) -> None:
        """It has come to its end: whoever else makes its tokens is beaten, and its sample's KV lies where it ran."""
        original = chunk.copy_of or chunk
        if original is not chunk and chunk.replica_id in self._table:
            sample = chunk.sample
            sample.last_replica, sample.last_node = chunk.replica_id, self._table.node(chunk.replica_id)
        for other in (original, *original.copies):
            if other is not chunk:
                other.beaten = True
                self._running.abort(other, f"{chunk.chunk_id} was first")

    def passes_on(self, chunk: Chunk) -> bool:
        """A chunk has failed, or is lost, or a copy gave way: whether its sample continues without it. An original's
        place is taken by its first copy that was not told to stop."""
        if chunk.beaten:
            return True
        if chunk.copy_of is not None:
            chunk.copy_of.copies.remove(chunk)
            return True
        heirs = [copy for copy in chunk.copies if not copy.aborting]
        if not heirs:
            for copy in chunk.copies:
                copy.beaten = True
            return False
        heir = heirs[0]
        heir.copy_of, heir.copies = None, [copy for copy in chunk.copies if copy is not heir]
        for copy in heir.copies:
            copy.copy_of = heir
        sample = chunk.sample
        sample.last_replica, sample.last_node = heir.replica_id, self._table.node(heir.replica_id)
        return True

    # ---- new copies --------------------------------------------------------------------------------

    def look(self, now: float, samples_wait: bool) -> list[tuple[Chunk, str]]:
        """Copies booked now, and why. While samples wait there are none: what copies hold is theirs."""
        if samples_wait:
            self._give_way()
            return []
        if not self._policy.room or now < self._looked_at + LOOK_S:
            return []
        self._looked_at = now
        workers = self._workers()
        return self._start(workers) if workers else []

    def _give_way(self) -> None:
        for copy in self._running.copies.values():
            if copy.copy_of is not None:  # else it has taken its original's place
                self._running.abort(copy, "samples wait for room")

    def _start(self, workers: list[FreeWorker]) -> list[tuple[Chunk, str]]:
        originals = {
            chunk.sample.sample_id: chunk
            for chunk in self._running.chunks.values()
            if chunk.copy_of is None and not (chunk.beaten or chunk.aborting)
        }
        stragglers = [self._straggler(chunk) for chunk in originals.values()]
        copies = []
        for assigned in self._policy.assign(stragglers, workers):
            chunk, replica_id = originals[assigned.sample_id], assigned.worker_id
            busy = {one.replica_id for one in (chunk, *chunk.copies)}
            if replica_id not in busy and self._table.room_tokens(replica_id) >= chunk.sample.need_tokens:
                copies.append((self._running.copy(chunk, replica_id, assigned.method), assigned.reason))
        return copies

    def _workers(self) -> list[FreeWorker]:
        """Replicas with less than the policy's room taken that can draft by another method than they do by themselves.
        Each drafts for copies by one at a time; one without any gets what fewest draft by so far, by rank."""
        room, ranked = self._policy.room, [rung.method for rung in self._policy.method_table.ranked()]
        methods = {copy.replica_id: copy.method for copy in self._running.copies.values()}
        used, workers = Counter(methods.values()), []
        for replica_id in self._table.ready():
            load, offered = self._table.running(replica_id), self._table.methods(replica_id)[1:]
            able = [name for name in ranked if name in offered]
            if load < room and able and self._table.room_tokens(replica_id):
                method = methods.get(replica_id) or min(able, key=lambda name: used[name])
                used[method] += replica_id not in methods
                workers.append(FreeWorker(replica_id, method, load, room))
        return workers

    def _straggler(self, chunk: Chunk) -> Straggler:
        own = (chunk.method,) if chunk.method else self._table.methods(chunk.replica_id)[:1]
        methods = (*own, *(copy.method for copy in chunk.copies))
        return Straggler(chunk.sample.sample_id, self._acceptance(chunk.sample), methods, chunk.replica_id)

    def _acceptance(self, sample: Sample) -> float:
        return sample.accepted_tokens / sample.drafted_tokens if sample.drafted_tokens else self._policy.usual

    # ---- what they may bring -------------------------------------------------------------------------

    def outlook(self, replicas: int) -> RacesView:
        """On so many replicas, for all that runs. Costs O(running) where these have room for copies."""
        policy, running = self._policy, len(self._running)
        if not 0 < running < policy.room * replicas:
            return RacesView(policy.room)
        methods = next(map(self._table.methods, self._table.ready()), ())
        copies = len(policy.method_table.among(methods[1:]).rungs)
        if not copies:
            return RacesView(policy.room)
        originals = [c for c in self._running.chunks.values() if c.copy_of is None and not c.beaten]
        return RacesView(policy.room, copies, sum(self._gain(chunk.sample, methods) for chunk in originals) / running)

    def _gain(self, sample: Sample, methods: tuple[str, ...]) -> float:
        key = methods, round(self._acceptance(sample), 2)
        if key not in self._gains:
            self._gains[key] = self._policy.method_table.among(methods).gain(methods[0], key[1])
        return self._gains[key]


def counts(event: ChunkFinished, chunk: Chunk) -> bool:
    """Whether its tokens are its sample's: not where it was beaten, or is a copy that was told to give way."""
    return not (chunk.beaten or (event.end is ChunkEnd.ABORTED and chunk.copy_of is not None))
