"""The cost of metrics, traces and a board for a coordinator with modelled engines: on and off, in turns, in one run.

There are two measurements in processor time of the loop's thread. The first compares the time per chunk end in windows
with all observers and in windows without. New batches come unevenly and weigh far more than observers. So the second
sums the time of each call that exists for observers, in the windows with them. With observers all exporters of the
service run, except that no collector answers to metrics. Without observers no end is counted, and nothing is read or
watched; the time of the few spans that are made is subtracted. Called by
lab/benchmarks/control_plane/fleet_coordinator.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from statistics import median

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from prometheus_client.metrics_core import Metric as Family

from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.metrics.export import MetricsExport
from tailrace.deployments.metrics.otlp_exporter import OtlpExporter
from tailrace.deployments.metrics.ray_exporter import RayExporter
from tailrace.lab.benchmarks.observability.board_looks import Reader, TimedLooks
from tailrace.lab.benchmarks.observability.totals import NoTotals, TimedTotals
from tailrace.lab.benchmarks.observability.tracing_cost import TracingCost
from tailrace.lab.benchmarks.observability.windows import WINDOW_S, QuietWindow, costs

JOIN_S = 2.0
"""Seconds between the start of a board and its window: the board's first look finds all rows new."""


class Dropped(MetricExporter):
    """An exporter that drops the metrics, as if a collector answered at once."""

    def export(self, metrics_data, timeout_millis=10_000, **kwargs) -> MetricExportResult:
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=10_000) -> bool:
        return True

    def shutdown(self, timeout_millis=30_000, **kwargs) -> None:
        pass


class TimedExport(MetricsExport):
    """An export that times itself. `took_s`: processor seconds of the exporting threads."""

    took_s = 0.0

    def send(self, families: Sequence[Family]) -> None:
        began_s = time.thread_time()
        super().send(families)
        self.took_s += time.thread_time() - began_s


class Read:
    """Reader of the metrics that times itself. `took_s`: processor seconds of each read."""

    def __init__(self, rollouts: Rollouts):
        self._rollouts, self.took_s = rollouts, []

    def __call__(self) -> list[Family]:
        began_s = time.thread_time()
        families = list(self._rollouts.metrics.collect())
        self.took_s.append(time.thread_time() - began_s)
        return families


class Observed:
    """A coordinator whose observers can be turned on. `engines`: its engine client, whose `ended` is the number of
    chunks that have ended.
    """

    def __init__(self, rollouts: Rollouts, engines, tracing: TracingCost):
        self._rollouts, self._engines, self._tracing = rollouts, engines, tracing
        self._own, self._timed, self._none = rollouts.totals, TimedTotals(), NoTotals()
        self.read, self.looks, self.reader = Read(rollouts), TimedLooks(rollouts), Reader(rollouts)
        exporters = OtlpExporter("tailrace-coordinator", Dropped()), RayExporter()
        self.export = TimedExport(exporters, self.read)

    async def window(self, on: bool) -> QuietWindow:
        """Runs one window, with all observers or without. Returns its figures."""
        async with self._all() if on else self._nothing():
            before = self._sums()
            await asyncio.sleep(WINDOW_S)
            return QuietWindow(*(now - then for now, then in zip(self._sums(), before, strict=True)))

    @asynccontextmanager
    async def _all(self) -> AsyncIterator[None]:
        self._count_by(self._timed)
        watching = asyncio.ensure_future(self.reader.run())
        await asyncio.sleep(JOIN_S)
        exporting = asyncio.ensure_future(self.export.run())
        yield
        for task in (watching, exporting):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._count_by(self._own)

    @asynccontextmanager
    async def _nothing(self) -> AsyncIterator[None]:
        self._count_by(self._none)
        yield
        self._count_by(self._own)

    def _count_by(self, totals) -> None:
        self._rollouts.totals = self._rollouts._runner.totals = totals

    def _sums(self) -> QuietWindow:
        sums = self._timed.took_s, sum(self.read.took_s), self._tracing.worked_s, sum(self.looks.took_s)
        return QuietWindow(self._engines.ended, time.thread_time(), *sums)


async def observing_cost(rollouts: Rollouts, engines, tracing: TracingCost, pairs: int) -> dict:
    """Returns the figures of `pairs` pairs of windows, one window with observers and one without in each pair."""
    observed = Observed(rollouts, engines, tracing)
    windows: tuple[list[QuietWindow], list[QuietWindow]] = ([], [])
    for pair in range(pairs):
        for on in (pair % 2, 1 - pair % 2):  # so that growth of any kind falls on both
            windows[on].append(await observed.window(bool(on)))
    return costs(windows[0], windows[1]) | {
        "read_ms": _ms(observed.read.took_s),
        "board_look_ms": _ms(observed.looks.took_s),
        "board_looks_per_s": round(len(observed.looks.took_s) / (pairs * (WINDOW_S + JOIN_S)), 2),
        "board_bytes_per_s": round(observed.reader.bytes / (pairs * (WINDOW_S + JOIN_S))),
        "thread_share_of_core": round(observed.export.took_s / (pairs * WINDOW_S), 5),
    }


def _ms(seconds: list[float]) -> float:
    return round(1e3 * median(seconds), 3)
