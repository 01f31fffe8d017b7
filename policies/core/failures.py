"""Failed chunks: whether the replica or the sample is to blame, and how long each pauses.

A replica on which chunks of several samples fail in a row is set aside for a while, and these failures do not count
against the samples. A sample is given up for its own failures: where others succeed, or on many replicas.
Invariant: a paused sample is in this book until it is due or has ended. Called by `RolloutCore` alone.
"""

from typing import NamedTuple

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Sample

MAX_SAMPLES = 3
"""Samples that fail in a row on one replica, without a success between, after which it is set aside."""

MAX_ATTEMPTS = 5
"""A sample's failures in a row, on replicas where others succeeded meanwhile or on as many different replicas, after
which it ends as failed. More point to a poisoned sample, not to bad luck."""

MAX_DOUBTFUL_ATTEMPTS = 12
"""A sample's failures in a row after which it ends as failed, if no other sample shows that the replica is sound."""

SAMPLE_PAUSE_S = (0.5, 30.0)
"""Pause of a sample after its second failure in a row, seconds; doubled with each, up to the second value. The first
failure costs no pause."""

REPLICA_PAUSE_S = (5.0, 300.0)
"""Seconds for which a replica is set aside for the first time; doubled with each in a row, up to the second value."""


class _Attempts:
    """`lost`: replicas that left. `own`: failures on replicas where others succeeded. `replicas`: those it failed on."""

    __slots__ = ("count", "first_s", "lost", "own", "replicas")

    def __init__(self, now: float):
        self.first_s, self.count, self.lost, self.own, self.replicas = now, 0, 0, 0, set()

    @property
    def on_different_replicas(self) -> int:
        return self.lost + len(self.replicas)


class _Streak:
    __slots__ = ("error", "samples", "times", "until_s")

    def __init__(self):
        self.samples: dict[str, int] = {}  # failures in a row, by sample
        self.times, self.until_s = 0, None  # how often it was set aside in a row, and until when it is
        self.error = ""


class Verdict(NamedTuple):
    """Consequences of a failed chunk. `aside`: the replica is set aside now. `pause_s`: of the sample."""

    given_up: bool
    aside: bool
    pause_s: float


class Failures:
    """Failures in a row, by sample and by replica."""

    def __init__(self, table: ReplicaTable):
        self._table = table
        self._attempts: dict[str, _Attempts] = {}
        self._streaks: dict[str, _Streak] = {}
        self._good_s: dict[str, float] = {}  # last success by replica
        self._paused: dict[str, tuple[float, Sample]] = {}

    def attempts(self, sample: Sample) -> int:
        """Number of the sample's failures in a row that count."""
        return self._attempts[sample.sample_id].count

    def succeed(self, sample: Sample, replica_id: str, now: float) -> None:
        self._attempts.pop(sample.sample_id, None)
        self._good_s[replica_id] = now
        if self._streaks.pop(replica_id, None) is not None and replica_id in self._table:
            self._table.readmit(replica_id)

    def lose(self, sample: Sample, replica_id: str, now: float) -> bool:
        """Note that the sample's replica has left. Returns whether the sample is given up."""
        self._good_s.pop(replica_id, None)
        self._streaks.pop(replica_id, None)
        attempts = self._attempts.setdefault(sample.sample_id, _Attempts(now))
        attempts.count += 1
        attempts.lost += 1
        return attempts.on_different_replicas >= MAX_ATTEMPTS

    def fail(self, sample: Sample, replica_id: str, error: str, now: float) -> Verdict:
        """Note that a chunk of the sample has failed on a replica that is still here."""
        attempts = self._attempts.setdefault(sample.sample_id, _Attempts(now))
        attempts.count += 1
        attempts.own += self._good_s.get(replica_id, float("-inf")) > attempts.first_s
        attempts.replicas.add(replica_id)
        streak = self._streaks.setdefault(replica_id, _Streak())
        streak.samples[sample.sample_id] = streak.samples.get(sample.sample_id, 0) + 1
        streak.error = error
        # One that was aside before is on trial: any failure shows that nothing has changed.
        if len(streak.samples) >= MAX_SAMPLES or (streak.times and streak.until_s is None):
            self._set_aside(replica_id, streak, now)
            return Verdict(False, True, 0.0)
        if streak.until_s is not None:  # one of the chunks that still ran when it was set aside
            self._forgive(replica_id, streak)
            return Verdict(False, False, 0.0)
        given_up = (
            attempts.own >= MAX_ATTEMPTS
            or attempts.on_different_replicas >= MAX_ATTEMPTS
            or attempts.count >= MAX_DOUBTFUL_ATTEMPTS
        )
        return Verdict(given_up, False, _pause_s(SAMPLE_PAUSE_S, attempts.count - 1))

    def _set_aside(self, replica_id: str, streak: _Streak, now: float) -> None:
        streak.times += 1
        streak.until_s = now + _pause_s(REPLICA_PAUSE_S, streak.times)
        self._table.set_aside(
            replica_id, f"{len(streak.samples)} samples failed on it in a row; the last: {streak.error}"
        )
        self._forgive(replica_id, streak)

    def _forgive(self, replica_id: str, streak: _Streak) -> None:
        for sample_id, count in streak.samples.items():
            attempts = self._attempts.get(sample_id)
            if attempts is not None:
                attempts.count -= count
                attempts.replicas.discard(replica_id)
        streak.samples.clear()

    def pause(self, sample: Sample, until_s: float) -> None:
        self._paused[sample.sample_id] = until_s, sample

    def resume(self, sample: Sample) -> None:
        """Note that a sample is queued: it does not pause any more."""
        self._paused.pop(sample.sample_id, None)

    def is_paused(self, sample: Sample) -> bool:
        return sample.sample_id in self._paused

    def forget(self, sample: Sample) -> None:
        """Forget a sample that has ended."""
        self._paused.pop(sample.sample_id, None)
        self._attempts.pop(sample.sample_id, None)

    def due(self, now: float) -> list[Sample]:
        """Samples whose pause is over; and readmits the replicas whose time aside is over."""
        for replica_id, streak in list(self._streaks.items()):
            if replica_id not in self._table:
                del self._streaks[replica_id]
            elif streak.until_s is not None and streak.until_s <= now:
                streak.until_s = None
                self._table.readmit(replica_id)
        return [sample for until_s, sample in self._paused.values() if until_s <= now]


def _pause_s(limits: tuple[float, float], times: int) -> float:
    """Seconds after the `times`-th time: 0 before the first, then doubled."""
    shortest, longest = limits
    return min(longest, shortest * 2 ** (times - 1)) if times > 0 else 0.0
