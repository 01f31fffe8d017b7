"""Trajectories, samples of several turns: which are active, and which keep their KV on a replica between two turns.

A sample with a further turn begins only if the policy says that its KV fits; until then it is parked, in order of
arrival. Between two turns its KV is kept on its replica if it is dear to bring back: the room counts as taken until
another sample waits for it; then those that return last give theirs up. If contexts outgrow all KV, the newest
pausing trajectory is suspended: its KV is released, and its next turn is parked. A branch takes the place of the
sample that it follows. Invariant: without a policy that is `on`, all of this is empty. Called by `RolloutCore` alone;
O(log samples) an event.
"""

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf

from tailrace.policies.core.kv_tracker import KvTracker
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Group, Sample
from tailrace.policies.core.sample_states import ENDED, HELD
from tailrace.policies.families.trajectories import ActiveTrajectories
from tailrace.policies.models.gap_belief import GapBelief
from tailrace.policies.protocol.actions import ReleaseKv
from tailrace.policies.protocol.views import TrajectoryLoad

PRIOR_ENDS = 8.0
"""Weight of the prior, in trajectories that have ended, that one grows by the mean context with which they begin."""


class _Pause:
    """A trajectory between two turns: since when, when it is expected, and the replica that keeps its KV."""

    __slots__ = ("due_s", "replica_id", "sample", "since_s")

    def __init__(self, sample: Sample, since_s: float, due_s: float):
        self.sample, self.since_s, self.due_s = sample, since_s, due_s
        self.replica_id: str | None = None


class TrajectoryBook:
    """`table` counts kept KV as taken. `kv`: knows what the pool can hold, and releases."""

    def __init__(self, policy: ActiveTrajectories, table: ReplicaTable, kv: KvTracker):
        self._policy, self._table, self._kv, self.on = policy, table, kv, policy.on
        self._gaps = GapBelief()
        self._active: dict[str, int] = {}  # by sample id: tokens of context
        self._tokens = 0  # sum of these
        self._parked: dict[str, Sample] = {}
        self._first: list[tuple[int, int, str]] = []  # parked ones by arrival, dead entries among them
        self._pauses: dict[str, _Pause] = {}
        self._late: list[tuple[float, str, _Pause]] = []  # kept ones by expected return, last first
        self._soon: list[tuple[float, str, _Pause]] = []  # the same, first first: those that are overdue
        self._newest: list[tuple[int, int, str]] = []  # pausing ones, newest first
        self._suspended: set[str] = set()
        self._followed: set[str] = set()
        self._grown = self._begun = self._begun_tokens = self._ended = 0

    # ---- admission ---------------------------------------------------------------------------------------

    def parks(self, sample: Sample) -> bool:
        """Returns whether a sample has to wait until its trajectory may begin; else it is active, if it has turns."""
        if not self.on or sample.sample_id in self._active:
            return False
        if not (sample.hold_s or sample.sample_id in self._suspended):
            return False
        if self._parked or not self._fits(sample):
            self._parked[sample.sample_id] = sample
            heappush(self._first, (sample.group.arrival, sample.index, sample.sample_id))
            return True
        self._begin(sample)
        return False

    def admitted(self) -> list[Sample]:
        """Returns the parked samples that may begin now, in order; they are active."""
        found = []
        while self._first:
            sample = self._parked.get(self._first[0][2])
            if sample is not None and not self._fits(sample):
                break
            heappop(self._first)
            if sample is not None:
                del self._parked[sample.sample_id]
                self._begin(sample)
                found.append(sample)
        return found

    def is_parked(self, sample: Sample) -> bool:
        return sample.sample_id in self._parked

    def follow(self, groups: Iterable[Group], samples: Mapping[str, Sample]) -> None:
        """Lets the first samples of new groups take the places of active ones, on whose replicas part of their KV
        lies.
        """
        for group in groups if self.on else ():
            of, sample = samples.get(group.spec.follows), group.samples[0]
            if of is not None and of.sample_id in self._active:
                self._unkeep(of.sample_id)
                self._gaps.follow(sample.sample_id, of.sample_id)
                self._followed.add(of.sample_id)
                self._begin(sample)
                sample.last_replica, sample.last_node = of.last_replica, of.last_node

    def _load(self) -> TrajectoryLoad:
        begun_tokens = self._begun_tokens / self._begun if self._begun else 0.0
        growth_tokens = (self._grown + PRIOR_ENDS * begun_tokens) / (self._ended + PRIOR_ENDS)
        capacity_tokens = max(self._kv.capacity_tokens, self._table.total_tokens)
        return TrajectoryLoad(len(self._active), self._tokens, growth_tokens, capacity_tokens)

    def _fits(self, sample: Sample) -> bool:
        return not self._active or self._policy.fits(self._load(), sample.context_tokens)

    def _begin(self, sample: Sample) -> None:
        context_tokens = self._active[sample.sample_id] = sample.context_tokens
        self._tokens += context_tokens
        self._suspended.discard(sample.sample_id)
        self._begun += 1
        self._begun_tokens += context_tokens

    def _grow(self, sample: Sample) -> None:
        grown = sample.context_tokens - self._active[sample.sample_id]
        self._active[sample.sample_id] += grown
        self._tokens += grown
        self._grown += grown

    # ---- turns -------------------------------------------------------------------------------------------

    def pause(self, sample: Sample, now: float) -> None:
        """Keeps the KV of a sample whose turn has ended on its replica, if that stays."""
        if sample.sample_id not in self._active:
            return
        self._grow(sample)
        pause = _Pause(sample, now, now + self._gaps.expected_s(sample.sample_id))
        self._pauses[sample.sample_id] = pause
        heappush(self._newest, (-sample.group.arrival, -sample.index, sample.sample_id))
        replica_id = sample.last_replica
        fits = self._table.room_tokens(replica_id) >= sample.context_tokens
        if fits and self._policy.keeps(pause.due_s - now, self._back_s(sample, replica_id), False):
            pause.replica_id = replica_id
            self._table.keep(replica_id, sample.sample_id, sample.context_tokens)
            heappush(self._late, (-pause.due_s, sample.sample_id, pause))
            heappush(self._soon, (pause.due_s, sample.sample_id, pause))
        self._sweep()

    def resume(self, sample: Sample, now: float) -> None:
        """Ends the pause of a sample that returns."""
        if (pause := self._pauses.get(sample.sample_id)) is not None:
            self._gaps.learn(sample.sample_id, now - pause.since_s)
            self._unkeep(sample.sample_id)
            del self._pauses[sample.sample_id]
            if sample.sample_id in self._active:
                self._grow(sample)

    def end(self, sample: Sample) -> None:
        """Removes a sample that has ended."""
        if not self.on:
            return
        name = sample.sample_id
        self._unkeep(name)
        self._pauses.pop(name, None)
        self._parked.pop(name, None)
        self._gaps.forget(name)
        self._suspended.discard(name)
        if name in self._active:
            self._grow(sample)
            self._tokens -= self._active.pop(name)
            self._ended += name not in self._followed
        self._followed.discard(name)

    # ---- room --------------------------------------------------------------------------------------------

    def make_room(self, now: float) -> bool:
        """Gives up the kept KV that is needed last, if it is worth the way back. Returns whether there was any."""
        pause = self._last(now)
        if pause is None:
            return False
        left_s = pause.due_s - now if pause.due_s > now else now - pause.since_s  # overdue: as long again
        if self._policy.keeps(left_s, self._back_s(pause.sample, pause.replica_id), True):
            return False
        self._unkeep(pause.sample.sample_id)
        return True

    def _back_s(self, sample: Sample, replica_id: str) -> float:
        """Returns the seconds that bringing KV back to a replica takes: from the pool, or computed. Without any
        measurement that is dear if the pool has none of it.
        """
        performance = self._table.performance(replica_id)
        if performance is None or not performance.prefill_token_s:
            return 0.0 if sample.stored_tokens else inf
        if sample.stored_tokens:
            return performance.move_s(sample.context_tokens)
        return performance.prefill_token_s * sample.context_tokens

    def _last(self, now: float) -> _Pause | None:
        """Returns the kept sample that is needed last: one that is overdue, since long gaps have a long rest, or the
        one that is expected last."""
        for heap in (self._soon, self._late):
            while heap and (heap[0][2].replica_id is None or self._pauses.get(heap[0][1]) is not heap[0][2]):
                heappop(heap)
        if self._soon and self._soon[0][0] < now:
            return self._soon[0][2]
        return self._late[0][2] if self._late else None

    def release_all(self) -> bool:
        """Gives up all kept KV. Returns whether there was any."""
        return any([self._unkeep(name) for name in self._pauses])

    def lose(self, replica_id: str) -> None:
        """Records that a replica has left, with the KV that it kept."""
        for pause in self._pauses.values():
            if pause.replica_id == replica_id:
                pause.replica_id = None

    def suspend(self) -> list[ReleaseKv]:
        """Suspends pausing samples until contexts fit, the newest first. Releases their KV."""
        found = []
        while self._newest and len(self._active) > 1 and self._policy.is_overfull(self._load()):
            name = heappop(self._newest)[2]
            if (pause := self._pauses.get(name)) is None or name not in self._active or pause.sample.state is not HELD:
                continue
            self._unkeep(name)
            self._tokens -= self._active.pop(name)
            self._suspended.add(name)
            found += self._kv.suspend(pause.sample)
        return found

    def _unkeep(self, name: str) -> bool:
        pause = self._pauses.get(name)
        if pause is None or pause.replica_id is None:
            return False
        self._table.unkeep(pause.replica_id, name)
        pause.replica_id = None
        return True

    def _sweep(self) -> None:
        """Removes dead entries once they outnumber the living by far."""
        limit = 64 + 4 * len(self._pauses)
        if len(self._late) > limit or len(self._soon) > limit:
            kept = [(p.due_s, name, p) for name, p in self._pauses.items() if p.replica_id is not None]
            self._soon = kept
            self._late = [(-due_s, name, p) for due_s, name, p in kept]
            heapify(self._soon)
            heapify(self._late)
        if len(self._newest) > limit:
            pausing = [p.sample for p in self._pauses.values() if p.sample.state is not ENDED]
            self._newest = [(-s.group.arrival, -s.index, s.sample_id) for s in pausing]
            heapify(self._newest)
