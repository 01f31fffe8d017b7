"""Failed chunks: whether the replica or the sample is to blame, and how long each pauses.

A replica on which chunks of several samples fail in a row is set aside for a while, and these failures do not count
against the samples. A sample is given up for its own failures: on replicas where others succeed, or on many replicas.
If replicas leave under several samples at once, trials show which of these samples ends them. Invariant: a paused
sample is in this book and in no queue, until it is due or has ended. Called by `RolloutCore` alone.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from math import inf
from typing import NamedTuple

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.running_chunks import RunningChunks

MAX_SAMPLES = 3
"""Number of samples that fail in a row on one replica, without a success between, after which it is set aside."""

MAX_ATTEMPTS = 5
"""Number of a sample's failures in a row, on replicas where others succeeded meanwhile or on as many different
replicas, after which it ends as failed. More point to a poisoned sample, not to bad luck.
"""

MAX_LOST = 2
"""Number of replicas in a row that left under a sample, after which it waits for its trial."""

MAX_LOST_ALONE = MAX_ATTEMPTS - MAX_LOST
"""Number of replicas that left under a sample while it was alone on trial, after which it ends as failed."""

MAX_DOUBTFUL_ATTEMPTS = 20
"""Number of a sample's failures in a row after which it ends as failed, if no other sample shows that the replica is
sound.

With the pauses between them that takes more than six minutes: the only replica may be in trouble for that long.
"""

MAX_FORGIVEN = 24
"""Number of a sample's failures on replicas that were set aside, after which it ends as failed: perhaps no replica is
to blame.

With the pauses of two replicas that takes half an hour; `status` names the reason meanwhile.
"""

SAMPLE_PAUSE_S = (0.5, 30.0)
"""Seconds that a sample pauses after its second failure in a row; doubled with each, up to the second value. The first
failure costs no pause.
"""

REPLICA_PAUSE_S = (5.0, 300.0)
"""Seconds for which a replica is set aside the first time; doubled with each in a row, up to the second value."""


class _Attempts:
    """A sample's attempts since its last success. `lost`, `lost_alone`: replicas that left, and those that left while
    it was alone on trial; a replica that comes back and leaves again counts once. `failed`, `own`: failures by replica,
    and those of them with evidence that the replica was sound. `forgiven`: failures on replicas that were set aside.
    `turn`: turn of the last failure.
    """

    __slots__ = ("failed", "forgiven", "lost", "lost_alone", "own", "turn")

    def __init__(self):
        self.forgiven = self.turn = 0
        self.lost: set[str] = set()
        self.lost_alone: set[str] = set()
        self.failed: Counter[str] = Counter()
        self.own: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return len(self.lost) + self.forgiven + self.failed.total()

    @property
    def suspect(self) -> bool:
        """True if the sample may run only on trial, alone."""
        return len(self.lost) >= MAX_LOST

    @property
    def given_up(self) -> bool:
        if max(self.own.total(), len(self.failed)) >= MAX_ATTEMPTS or len(self.lost_alone) >= MAX_LOST_ALONE:
            return True
        return self.forgiven >= MAX_FORGIVEN or len(self.lost) + self.failed.total() >= MAX_DOUBTFUL_ATTEMPTS


class _Streak:
    """A replica's failures since its last success: samples that failed, how often it was set aside, and until when."""

    __slots__ = ("samples", "times", "turn", "until_s")

    def __init__(self):
        self.samples: set[str] = set()
        self.times, self.turn, self.until_s = 0, 0, None


class _Trials:
    """Samples under which replicas left, tried in rounds: one alone, then twice as many after each round without a
    loss.
    """

    def __init__(self):
        self._running: set[str] = set()
        self._size, self._alone = 1, False  # size of the next round; whether this one began with one sample

    def next_round(self, waiting: Iterable[Sample]) -> list[Sample]:
        """Returns the samples whose trials begin now: none before those of the last round are over."""
        samples = [] if self._running else list(islice(waiting, self._size))
        if samples:
            self._running = {sample.sample_id for sample in samples}
            self._size, self._alone = 2 * self._size, len(samples) == 1
        return samples

    def lose(self, sample: Sample) -> bool:
        """Records that the sample's replica has left. Returns whether the sample was alone on trial."""
        alone = self._alone and sample.sample_id in self._running
        self._running.discard(sample.sample_id)
        self._size = 1
        return alone

    def end(self, sample: Sample) -> None:
        """Records that the sample's trial, if it has one, is over: its chunk has ended, or it has."""
        self._running.discard(sample.sample_id)


class Verdict(NamedTuple):
    """Consequences of a failed chunk. `aside`: the replica is set aside now. `pause_s`: seconds that the sample
    pauses.
    """

    given_up: bool
    aside: bool
    pause_s: float


class Failures:
    """Failures in a row, by sample and by replica. A success is evidence if its chunk started after the failure."""

    def __init__(self, table: ReplicaTable, running: RunningChunks):
        self._table, self._running = table, running
        self._attempts: dict[str, _Attempts] = {}
        self._streaks: dict[str, _Streak] = {}
        self._sound: dict[str, int] = {}  # by replica: turn at which its newest successful chunk started
        self._paused: dict[str, tuple[float, Sample]] = {}
        self._trials = _Trials()

    def attempts(self, sample: Sample) -> int:
        """Number of the sample's failures in a row."""
        return self._attempts[sample.sample_id].count

    def succeed(self, sample: Sample, chunk: Chunk) -> None:
        """Records that a chunk of the sample has ended well."""
        replica_id, born = chunk.replica_id, chunk.born
        if born > self._sound.get(replica_id, -1):
            self._sound[replica_id] = born
        if self._attempts and self._attempts.pop(sample.sample_id, None) is not None:
            self._trials.end(sample)
        if replica_id in self._streaks and born > self._streaks[replica_id].turn:
            del self._streaks[replica_id]
            self._table.readmit(replica_id)

    def leave(self, replica_id: str) -> None:
        """Forgets a replica that has left."""
        self._sound.pop(replica_id, None)
        self._streaks.pop(replica_id, None)

    def lose(self, sample: Sample, replica_id: str) -> Verdict:
        """Records that the sample's replica has left. A pause without end lasts until the sample's trial."""
        attempts = self._attempts.setdefault(sample.sample_id, _Attempts())
        attempts.lost.add(replica_id)
        if self._trials.lose(sample):
            attempts.lost_alone.add(replica_id)
        return Verdict(attempts.given_up, False, inf if attempts.suspect else 0.0)

    def fail(self, sample: Sample, chunk: Chunk, error: str, now: float) -> Verdict:
        """Records that a chunk of the sample has failed on a replica that is still here."""
        replica_id, turn = chunk.replica_id, self._running.turns
        attempts = self._attempts.setdefault(sample.sample_id, _Attempts())
        self._trials.end(sample)
        attempts.failed[replica_id] += 1
        attempts.own[replica_id] += self._sound.get(replica_id, 0) > attempts.turn > 0
        attempts.turn = turn
        streak = self._streaks.setdefault(replica_id, _Streak())
        streak.turn = turn
        streak.samples.add(sample.sample_id)
        if streak.until_s is not None:  # set aside while this chunk ran
            self._forgive(replica_id)
            return Verdict(attempts.given_up, False, inf if attempts.suspect else 0.0)
        if len(streak.samples) >= MAX_SAMPLES or streak.times:  # one that was set aside before is on trial
            self._set_aside(replica_id, streak, error, now)
            return Verdict(attempts.given_up, True, inf if attempts.suspect else 0.0)
        pause_s = _pause_s(SAMPLE_PAUSE_S, attempts.failed.total() - 1)
        return Verdict(attempts.given_up, False, pause_s or (inf if attempts.suspect else 0.0))

    def _set_aside(self, replica_id: str, streak: _Streak, error: str, now: float) -> None:
        streak.times += 1
        streak.until_s = now + _pause_s(REPLICA_PAUSE_S, streak.times)
        self._table.set_aside(replica_id, f"{len(streak.samples)} samples failed on it in a row; the last: {error}")
        self._forgive(replica_id)

    def _forgive(self, replica_id: str) -> None:
        """Forgives samples their failures on a replica that may be to blame: these count little."""
        samples = self._streaks[replica_id].samples
        for sample_id in samples & self._attempts.keys():
            attempts = self._attempts[sample_id]
            attempts.forgiven += attempts.failed.pop(replica_id, 0)  # 0: a success since then has cleared the others
            attempts.own.pop(replica_id, None)
        samples.clear()

    def pause(self, sample: Sample, until_s: float) -> None:
        self._paused[sample.sample_id] = until_s, sample

    def is_paused(self, sample: Sample) -> bool:
        return sample.sample_id in self._paused

    def awaited(self, sample: Sample) -> str:
        """Returns what ends a sample's pause, for display."""
        until_s, _ = self._paused[sample.sample_id]
        return "its trial, since replicas left under it" if until_s == inf else "its pause after a failure"

    def forget(self, sample: Sample) -> None:
        """Forgets a sample that has ended."""
        self._paused.pop(sample.sample_id, None)
        self._attempts.pop(sample.sample_id, None)
        self._trials.end(sample)

    def resume(self, now: float) -> list[Sample]:
        """Ends the pauses of samples that are due or whose trial begins, and of replicas. Returns the samples."""
        if not self._streaks and not self._paused:
            return []
        for replica_id, streak in self._streaks.items():
            if streak.until_s is not None and streak.until_s <= now:
                streak.until_s = None
                self._table.readmit(replica_id)
        due = []
        for until_s, sample in list(self._paused.values()):
            if until_s <= now and self._attempts[sample.sample_id].suspect:
                self._paused[sample.sample_id] = inf, sample
            elif until_s <= now:
                due.append(sample)
        due += self._trials.next_round(sample for until_s, sample in self._paused.values() if until_s == inf)
        for sample in due:
            del self._paused[sample.sample_id]
        return due


def _pause_s(limits: tuple[float, float], times: int) -> float:
    """Returns the pause after the `times`-th time: 0 before the first, then doubled."""
    shortest, longest = limits
    return min(longest, shortest * 2 ** (times - 1)) if times > 0 else 0.0
