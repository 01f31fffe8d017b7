"""Trajectories, samples of several turns: which are active, and which keep their KV on a replica between two turns.

A sample with a further turn begins only if the policy says that its KV fits; until then it is parked, in order of
arrival. Between two turns its KV is kept on its replica if it is dear to bring back: the room counts as taken until
another sample waits for it; then those that return last give theirs up. If contexts outgrow all KV, or if others wait
to begin while it stays away for long, a pausing trajectory is suspended: its KV is released, and its next turn is
parked. A branch begins at once. Invariant: without a policy that is `on`, only pauses are here. Called by `RolloutCore`
alone; O(log samples) an event.
"""

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf

from tailrace.policies.core.kv_tracker import KvTracker
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Group, Sample
from tailrace.policies.core.sample_ends import HeldSamples
from tailrace.policies.core.sample_states import ENDED, HELD
from tailrace.policies.families.trajectories import ActiveTrajectories
from tailrace.policies.models.gap_belief import GapBelief
from tailrace.policies.protocol.actions import ReleaseKv
from tailrace.policies.protocol.views import TrajectoryLoad

PRIOR_ENDS = 8.0
"""Weight of the prior, in trajectories that have ended, that one grows by the mean context with which they begin."""


LOOK_S = 1.0
"""Minimum seconds between two looks at a pause, whether it gives up its KV; later looks wait as long as it lasted."""


class _Pause:
    """A trajectory between two turns: since when, when it is expected, the tool that it called, and the replica that
    keeps its KV.
    """

    __slots__ = ("due_s", "replica_id", "sample", "since_s", "tool")

    def __init__(self, sample: Sample, since_s: float, tool: str, gaps: GapBelief):
        self.sample, self.since_s, self.tool = sample, since_s, tool
        self.due_s = since_s + gaps.left_s(sample.sample_id, tool)
        self.replica_id: str | None = None

    def __lt__(self, other: "_Pause") -> bool:
        return False  # of one sample and time, in heaps: only one of them is alive


class TrajectoryBook:
    """`table` counts kept KV as taken. `kv`: knows what the pool can hold, and releases. `freed`: called with a replica
    that has room again.
    """

    def __init__(self, policy: ActiveTrajectories, table: ReplicaTable, kv: KvTracker, freed: Callable[[str], None]):
        self._freed = freed
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
        self._looks: list[tuple[float, str, _Pause]] = []  # active pausing ones by the time of their next look
        self._suspended: set[str] = set()
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
        """Lets the first samples of new groups begin where active ones have part of their KV. They take the places of
        pausing ones, which wait to begin if they return.
        """
        for group in groups if self.on else ():
            of, sample = samples.get(group.spec.follows), group.samples[0]
            if of is not None and of.sample_id in self._active:
                self._unkeep(of.sample_id)
                self._gaps.follow(sample.sample_id, of.sample_id)
                if of.state is HELD:
                    self._leave(of)
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

    def _leave(self, sample: Sample) -> None:
        """Takes a sample's place; it waits to begin if it returns."""
        self._tokens -= self._active.pop(sample.sample_id)
        self._suspended.add(sample.sample_id)

    def is_spare(self, sample: Sample) -> bool:
        """Returns whether a branch has taken the place of a sample, so that its KV is needed last."""
        return sample.sample_id in self._suspended

    def _grow(self, sample: Sample) -> None:
        grown = sample.context_tokens - self._active[sample.sample_id]
        self._active[sample.sample_id] += grown
        self._tokens += grown
        self._grown += grown

    # ---- turns -------------------------------------------------------------------------------------------

    def pause(self, sample: Sample, now: float) -> None:
        """Keeps the KV of a sample whose turn has ended on its replica, if that stays."""
        pause = self._pauses[sample.sample_id] = _Pause(sample, now, "", self._gaps)
        if sample.sample_id not in self._active:
            return
        self._grow(sample)
        heappush(self._looks, (now, sample.sample_id, pause))
        heappush(self._newest, (-sample.group.arrival, -sample.index, sample.sample_id))
        replica_id = sample.last_replica
        fits = self._table.room_tokens(replica_id) >= sample.context_tokens
        if fits and self._policy.keeps(pause.due_s - now, self._back_s(sample, replica_id), False):
            self._table.keep(replica_id, sample.sample_id, sample.context_tokens)
            self._keep(pause, replica_id)
        self._sweep()

    def _keep(self, pause: _Pause, replica_id: str | None) -> None:
        pause.replica_id = replica_id
        if replica_id is not None:
            heappush(self._late, (-pause.due_s, pause.sample.sample_id, pause))
            heappush(self._soon, (pause.due_s, pause.sample.sample_id, pause))

    def call(self, name: str, tool: str, held: HeldSamples) -> None:
        """Records the tool that a sample has called, by which its return is expected, if it pauses."""
        if (before := self._pauses.get(name)) is None:
            return
        pause = self._pauses[name] = _Pause(before.sample, before.since_s, tool, self._gaps)
        self._keep(pause, before.replica_id)
        if name in self._active:
            heappush(self._looks, (before.since_s, name, pause))
        held.renew(pause.sample, self.held_until_s(pause.sample))

    def held_until_s(self, sample: Sample) -> float:
        """Returns when a pausing sample ends unless it returns."""
        pause = self._pauses[sample.sample_id]
        is_set = sample.hold_s < inf
        return pause.since_s + (sample.hold_s if is_set else self._policy.hold_s(pause.due_s - pause.since_s))

    def resume(self, sample: Sample, now: float) -> None:
        """Ends the pause of a sample that returns."""
        if (pause := self._pauses.get(sample.sample_id)) is not None:
            self._gaps.learn(sample.sample_id, pause.tool, now - pause.since_s)
            self._unkeep(sample.sample_id)
            del self._pauses[sample.sample_id]
            if sample.sample_id in self._active:
                self._grow(sample)

    def end(self, sample: Sample) -> None:
        """Removes a sample that has ended."""
        name = sample.sample_id
        self._unkeep(name)
        self._pauses.pop(name, None)
        self._parked.pop(name, None)
        self._gaps.forget(name)
        self._suspended.discard(name)
        if name in self._active:
            self._grow(sample)
            self._tokens -= self._active.pop(name)
            self._ended += 1

    # ---- room --------------------------------------------------------------------------------------------

    def make_room(self, now: float) -> bool:
        """Gives up the kept KV that is needed last, if it is worth the way back. Returns whether there was any."""
        pause = self._last(now)
        if pause is None:
            return False
        if self._policy.keeps(self._left_s(pause, now), self._back_s(pause.sample, pause.replica_id), True):
            return False
        self._unkeep(pause.sample.sample_id)
        return True

    def _left_s(self, pause: _Pause, now: float) -> float:
        return self._gaps.left_s(pause.sample.sample_id, pause.tool, max(0.0, now - pause.since_s))

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

    def suspend(self, now: float) -> list[ReleaseKv]:
        """Suspends pausing samples until contexts fit, the newest first, and those that give up their KV for one that
        waits to begin. Releases their KV.
        """
        found = []
        while self._newest and len(self._active) > 1 and self._policy.is_overfull(self._load()):
            name = heappop(self._newest)[2]
            if (pause := self._pauses.get(name)) is not None and self._is_active(pause):
                found += self._suspend(pause, "contexts have outgrown the KV: it began last")
        while self._looks and self._looks[0][0] <= now and self._is_short():
            _, name, pause = heappop(self._looks)
            if self._pauses.get(name) is not pause or not self._is_active(pause):
                continue
            if self._gives_up(pause, now):
                found += self._suspend(pause, "others wait to begin, and it is expected to stay away")
            else:
                heappush(self._looks, (now + max(LOOK_S, now - pause.since_s), name, pause))
        return found

    def _is_active(self, pause: _Pause) -> bool:
        return pause.sample.sample_id in self._active and pause.sample.state is HELD

    def _is_short(self) -> bool:
        """Returns whether a parked sample waits for room."""
        while self._first and self._first[0][2] not in self._parked:
            heappop(self._first)
        return bool(self._first) and not self._fits(self._parked[self._first[0][2]])

    def _gives_up(self, pause: _Pause, now: float) -> bool:
        performance = self._table.any_performance()
        if performance is None or not performance.prefill_token_s:
            return False
        compute_s = performance.prefill_token_s * pause.sample.context_tokens
        price_s = self._gaps.price_s(pause.sample.sample_id, pause.tool, max(0.0, now - pause.since_s))
        return self._policy.gives_up(price_s, compute_s, len(self._active) / self._table.staying)

    def _suspend(self, pause: _Pause, reason: str) -> tuple[ReleaseKv, ...]:
        self._unkeep(pause.sample.sample_id)
        self._leave(pause.sample)
        return self._kv.suspend(pause.sample, reason)

    def _unkeep(self, name: str) -> bool:
        pause = self._pauses.get(name)
        if pause is None or pause.replica_id is None:
            return False
        self._table.unkeep(pause.replica_id, name)
        self._freed(pause.replica_id)
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
        if len(self._looks) > limit:
            self._looks = [one for one in self._looks if self._pauses.get(one[1]) is one[2]]
            heapify(self._looks)
        if len(self._newest) > limit:
            pausing = [p.sample for p in self._pauses.values() if p.sample.state is not ENDED]
            self._newest = [(-s.group.arrival, -s.index, s.sample_id) for s in pausing]
            heapify(self._newest)
