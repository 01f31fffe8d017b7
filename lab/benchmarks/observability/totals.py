"""Totals for comparison: those that count nothing, and those that time themselves. Used by `bench observability`."""

import time

from tailrace.deployments.metrics.totals import EndTotals


class NoTotals(EndTotals):
    """Counts nothing."""

    def chunk_came(self, result) -> None:
        pass

    def wrote(self, result, moved) -> None:
        pass

    def sample_ended(self, end) -> None:
        pass

    def batch_over(self, seconds) -> None:
        pass


class TimedTotals(EndTotals):
    """`took_s`: of the thread's processor time, for counting, without the looks at the clock."""

    took_s = 0.0

    def _time(self, count, *arguments) -> None:
        before_s, began_s = time.thread_time(), time.thread_time()
        count(*arguments)
        self.took_s += time.thread_time() - began_s - (began_s - before_s)

    def chunk_came(self, result) -> None:
        self._time(super().chunk_came, result)

    def wrote(self, result, moved) -> None:
        self._time(super().wrote, result, moved)

    def sample_ended(self, end) -> None:
        self._time(super().sample_ended, end)

    def batch_over(self, seconds) -> None:
        self._time(super().batch_over, seconds)
