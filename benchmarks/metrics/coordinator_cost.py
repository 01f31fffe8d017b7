"""The cost of metrics for a coordinator with modelled engines: windows with and without, in turns, within one run.

Two ways: the loop's thread's processor time for each chunk's end in both kinds of windows; and, since new batches come
unevenly and weigh far more than metrics, the time of reading and counting themselves, by the same clock. With: as in
the service, all its doors, but for the collector's answer. Without: no end is counted and nothing is read.
Called by benchmarks/control_plane/fleet_coordinator.py.
"""

import asyncio
import time
from contextlib import suppress
from statistics import median
from typing import NamedTuple

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

from benchmarks.metrics.totals import NoTotals, TimedTotals
from tailrace.deployments.coordinator.rollouts import Rollouts
from tailrace.deployments.metrics.export import EXPORT_S, MetricsDoors
from tailrace.deployments.metrics.meters import OtlpDoor
from tailrace.deployments.metrics.metric import Figures
from tailrace.deployments.metrics.ray_door import RayDoor
from tailrace.deployments.metrics.registry import COORDINATOR

WINDOW_S = EXPORT_S + 0.2
"""Of one window: one look at the books, given twice."""


class Dropped(MetricExporter):
    """A collector that takes no time."""

    def export(self, metrics_data, timeout_millis=10_000, **kwargs) -> MetricExportResult:
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=10_000) -> bool:
        return True

    def shutdown(self, timeout_millis=30_000, **kwargs) -> None:
        pass


class TimedDoors(MetricsDoors):
    """`took_s`: of the exporting thread's processor time."""

    took_s = 0.0

    def give(self, figures: Figures) -> None:
        began_s = time.thread_time()
        super().give(figures)
        self.took_s += time.thread_time() - began_s


class Window(NamedTuple):
    """Of one window: seconds of the loop's thread and of the whole process, and ends of chunks."""

    loop_s: float
    process_s: float
    ends: int


class Read:
    """Reads the figures, and times it."""

    def __init__(self, rollouts: Rollouts):
        self._rollouts, self.took_s = rollouts, []

    def __call__(self) -> Figures:
        began_s = time.thread_time()
        figures = self._rollouts.figures()
        self.took_s.append(time.thread_time() - began_s)
        return figures


async def metrics_cost(rollouts: Rollouts, engines, pairs: int) -> dict:
    """Figures of `pairs` of windows. `engines`: `ended` is its number of chunks' ends."""
    read, own = Read(rollouts), rollouts.totals
    timed = TimedTotals(rollouts.now)
    doors = TimedDoors([OtlpDoor("tailrace-coordinator", COORDINATOR, Dropped()), RayDoor(COORDINATOR)], read)
    windows: tuple[list[Window], list[Window]] = ([], [])
    for pair in range(pairs):
        for on in (pair % 2, 1 - pair % 2):  # so that growth of any kind falls on both
            rollouts.count_by(timed if on else NoTotals(rollouts.now))
            export = asyncio.ensure_future(doors.export()) if on else None
            windows[on].append(await _window(engines))
            if export is not None:
                export.cancel()
                with suppress(asyncio.CancelledError):
                    await export
    rollouts.count_by(own)
    off, on = (_sums(some) for some in windows)
    spent_s = sum(read.took_s) + timed.took_s
    return {
        "windows": 2 * pairs,
        "chunk_ends": off.ends + on.ends,
        "loop_cost_timed": round(spent_s / (on.loop_s - spent_s), 5),
        "read_ms": round(1e3 * median(read.took_s), 3),
        "count_us_a_chunk": round(1e6 * timed.took_s / on.ends, 2),
        "thread_share_of_core": round(doors.took_s / (pairs * WINDOW_S), 5),
        "loop_us_a_chunk": {"off": round(1e6 * off.loop_s / off.ends, 1), "on": round(1e6 * on.loop_s / on.ends, 1)},
        "loop_cost_by_windows": round(on.loop_s / on.ends / (off.loop_s / off.ends) - 1, 4),
        "by_pair": [
            round(with_.loop_s / with_.ends / (without.loop_s / without.ends) - 1, 3)
            for without, with_ in zip(*windows, strict=True)
        ],
    }


async def _window(engines) -> Window:
    loop_s, process_s, ends = time.thread_time(), time.process_time(), engines.ended
    await asyncio.sleep(WINDOW_S)
    return Window(time.thread_time() - loop_s, time.process_time() - process_s, engines.ended - ends)


def _sums(windows: list[Window]) -> Window:
    return Window(*map(sum, zip(*windows, strict=True)))
