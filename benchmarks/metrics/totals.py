"""Totals for comparison: those that count nothing, and those that time themselves. Used by `bench metrics`."""

import time

from tailrace.deployments.metrics.totals import EndTotals


class NoTotals(EndTotals):
    """Counts nothing."""

    def chunk_came(self, result) -> None:
        pass

    def wrote(self, batch, result, moved) -> None:
        pass

    def sample_ended(self, end) -> None:
        pass

    def batch_over(self, batch) -> None:
        pass


def clock_s() -> float:
    """Seconds that one look at the thread's clock takes."""
    looks = [time.thread_time() for _ in range(10_000)]
    return (looks[-1] - looks[0]) / (len(looks) - 1)


class TimedTotals(EndTotals):
    """`took_s`: of the thread's processor time, for counting, without the looks at the clock."""

    def __init__(self, now):
        super().__init__(now)
        self.took_s, self._clock_s = 0.0, clock_s()

    def _time(self, count, *arguments) -> None:
        began_s = time.thread_time()
        count(*arguments)
        self.took_s += time.thread_time() - began_s - self._clock_s

    def chunk_came(self, result) -> None:
        self._time(super().chunk_came, result)

    def wrote(self, batch, result, moved) -> None:
        self._time(super().wrote, batch, result, moved)

    def sample_ended(self, end) -> None:
        self._time(super().sample_ended, end)

    def batch_over(self, batch) -> None:
        self._time(super().batch_over, batch)
