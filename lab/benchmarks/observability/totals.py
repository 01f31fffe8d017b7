"""Totals for comparison: one class counts nothing, another times itself. Used by `bench observability`."""

import time

from tailrace.deployments.metrics.totals import EndTotals


class NoTotals(EndTotals):
    """Totals that count nothing."""

    def chunk_came(self, result) -> None:
        pass

    def wrote(self, result, moved) -> None:
        pass

    def sample_ended(self, end) -> None:
        pass

    def batch_over(self, seconds) -> None:
        pass


class TimedTotals(EndTotals):
    """Totals that time themselves. `took_s`: processor seconds of counting, without those of reading the clock."""

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
