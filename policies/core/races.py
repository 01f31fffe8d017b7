"""Races: copies of running chunks on replicas with room, each with another draft method (SpecActor 4.2).

At exactness `bits` a copy makes the same tokens as its original, by the same noise (law 2). The first to reach the
chunk's end counts as the chunk. The others stop, and their tokens do not count. A copy continues alone after its
original's replica is lost. At `law` a copy may part from its original, and the first to end would be the shorter one
too often. So the original alone counts; copies end with it, or are lost with it. A copy's tokens reach the original as
drafts, by the group context, and the original verifies them. Each method then copies a chunk once.
Invariant: copies take room only while no sample waits for any. Called by `RolloutCore` alone.
"""

from collections import Counter

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.families.racing import FreeWorker, Racing, Straggler
from tailrace.policies.protocol.events import ChunkEnd, ChunkFinished
from tailrace.policies.protocol.exactness import Exactness
from tailrace.policies.protocol.performance import chance
from tailrace.policies.protocol.views import RacesView

LOOK_S = 1.0
"""Seconds between two looks at free room: many chunks end together, and a look reads the books of every replica."""


class Races:
    def __init__(self, policy: Racing, table: ReplicaTable, running: RunningChunks, exactness: Exactness = "bits"):
        self._policy, self._table, self._running = policy, table, running
        self._copies_count = exactness == "bits"
        self._looked_at = float("-inf")
        self._gains: dict[tuple[tuple[str, ...], float], float] = {}  # by methods and acceptance
        self._given, self._known = policy, None  # the policy as configured, and the performance that it was informed by

    # ---- ends of races -----------------------------------------------------------------------------

    def counts(self, event: ChunkFinished, chunk: Chunk) -> bool:
        """Returns whether the chunk's tokens count for its sample: not if it was beaten, nor if it is a copy that gave
        way, nor if it is a copy at `law`.
        """
        if chunk.beaten:
            return False
        return chunk.copy_of is None or (self._copies_count and event.end is not ChunkEnd.ABORTED)

    def decides(self, chunk: Chunk) -> bool:
        """Returns whether an engine's refusal of the chunk ends its sample: at `law` a copy may have other tokens."""
        return not chunk.beaten and (chunk.copy_of is None or self._copies_count)

    def won(self, chunk: Chunk) -> None:
        """Records that a chunk has reached its end. The other chunks of its race are beaten; its replica has the KV."""
        original = chunk.copy_of or chunk
        if original is not chunk and chunk.replica_id in self._table:
            sample = chunk.sample
            sample.last_replica, sample.last_node = chunk.replica_id, self._table.node(chunk.replica_id)
        for other in (original, *original.copies):
            if other is not chunk:
                other.beaten = True
                self._running.abort(other, f"{chunk.chunk_id} was first")

    def passes_on(self, chunk: Chunk) -> bool:
        """Returns whether the sample continues without a chunk that has failed, is lost, or is a copy that gave way.

        The first copy that is not being stopped takes the place of its original. At `law` none does: of two copies
        the longer one still runs, so the heirs of lost chunks would be too long.
        """
        if chunk.beaten:
            return True
        if chunk.copy_of is not None:
            chunk.copy_of.copies.remove(chunk)
            return True
        heirs = [copy for copy in chunk.copies if self._copies_count and not copy.aborting]
        if not heirs:
            for copy in chunk.copies:
                copy.beaten = True
                self._running.abort(copy, f"{chunk.chunk_id} is lost")
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
        """Returns the copies booked now, with reasons. While samples wait there are none, and copies give way."""
        if samples_wait:
            self._give_way()
            return []
        if not self._policy.room or now < self._looked_at + LOOK_S:
            return []
        self._looked_at = now
        self._inform()
        workers = self._workers()
        return self._start(workers) if workers else []

    def _inform(self) -> None:
        """Brings the policy's gains up to the last reports."""
        known, informed = self._table.any_performance(), getattr(self._given, "informed", None)
        if informed is not None and known is not self._known:
            self._policy, self._known = informed(known, self._chance), known
            self._gains.clear()

    def _chance(self, method: str) -> float:
        return self._table.chance(method, self._given.usual)

    def _give_way(self) -> None:
        for copy in self._running.copies.values():
            if copy.copy_of is not None:  # else it has taken its original's place
                self._running.abort(copy, "samples wait for room")

    def _start(self, workers: list[FreeWorker]) -> list[tuple[Chunk, str]]:
        originals = {
            chunk.sample.sample_id: chunk
            for chunk in self._running.chunks.values()
            if chunk.copy_of is None and not (chunk.beaten or chunk.aborting or self._table.keeps(chunk.replica_id))
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
        """Returns the replicas with less than the policy's room taken and with a draft method besides their default.

        Each drafts for copies by one method at a time. A replica without one gets the method that the fewest replicas
        use so far; ties go by rank.
        """
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
        tried = (copy.method for copy in chunk.copies) if self._copies_count else chunk.copied
        methods = (*own, *tried) or ("",)
        return Straggler(chunk.sample.sample_id, self._acceptance(chunk.sample, methods[0]), methods, chunk.replica_id)

    def _acceptance(self, sample: Sample, method: str) -> float:
        """Returns a sample's acceptance by its own tested drafts, and by those of the method on all replicas."""
        return chance(sample.accepted_tokens, sample.tested_tokens, self._chance(method))

    # ---- expected gain -------------------------------------------------------------------------------

    def outlook(self, replicas: int) -> RacesView:
        """Returns the expected gain of all running chunks on `replicas` replicas. O(running) if these have room for
        copies.
        """
        self._inform()
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
        key = methods, round(self._acceptance(sample, methods[0]), 2)
        if key not in self._gains:
            self._gains[key] = self._policy.method_table.among(methods).gain(methods[0], key[1])
        return self._gains[key]
