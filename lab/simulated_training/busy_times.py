"""Times in which replicas generated or loaded weights, and training ran. `TrainingHost` writes them for the figures.

Invariant: intervals of one replica and kind do not overlap, except loads that follow each other closely.
"""

from collections.abc import Iterable

Interval = tuple[float, float]


class BusyTimes:
    """Intervals in seconds: `training`, and `generating` and `loading` by replica."""

    def __init__(self, replicas: int):
        self.training: list[Interval] = []
        self.generating: list[list[Interval]] = [[] for _ in range(replicas)]
        self.loading: list[list[Interval]] = [[] for _ in range(replicas)]
        self._since: list[float | None] = [None] * replicas

    def trains(self, begin_s: float, end_s: float) -> None:
        self.training.append((begin_s, end_s))

    def loads(self, replica: int, begin_s: float, end_s: float) -> None:
        self.loading[replica].append((begin_s, end_s))

    def generates(self, replica: int, runs: bool, now: float) -> None:
        """Records, after a turn of the replica, whether it runs anything."""
        since = self._since[replica]
        if runs and since is None:
            self._since[replica] = now
        elif not runs and since is not None:
            self.generating[replica].append((since, now))
            self._since[replica] = None


def covered_s(intervals: Iterable[Interval], begin_s: float, end_s: float) -> float:
    """Returns the seconds from begin_s to end_s that are in at least one interval."""
    total_s, reached_s = 0.0, begin_s
    for interval in sorted(intervals):
        first_s, last_s = max(interval[0], reached_s), min(interval[1], end_s)
        if last_s > first_s:
            total_s += last_s - first_s
            reached_s = last_s
    return total_s
