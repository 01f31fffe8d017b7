"""Exports metrics every EXPORT_S: collected on the event loop, sent from a thread.

Invariant: an error of an exporter (a door), or of the reading, is logged once a kind; it ends neither the loop nor the
other exporters. Called by the coordinator and the gateway.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.metrics.metric import Figures
from tailrace.deployments.metrics.registry import PROCESSES

EXPORT_S = 10.0
"""Seconds between two readings. Each is sent twice: every 10 s Ray sends the gauges that were set since, and its page
drops one that was not sent for 20 s.
"""


class Door(Protocol):
    """An exporter: one way for figures out of the process."""

    def give(self, figures: Figures) -> None: ...


class MetricsDoors:
    """All exporters of a process. `read`: returns the figures."""

    def __init__(self, doors: Sequence[Door], read: Callable[[], Figures]):
        self._doors, self._read = doors, read
        self._logged: set[tuple[str, str]] = set()

    async def export(self, every_s: float = EXPORT_S) -> None:
        """Exports again and again. Never returns."""
        while True:
            await asyncio.sleep(every_s / 2)
            try:
                figures = self._read()
            except Exception as error:  # noqa: BLE001 - a defect of ours here must not end the service
                self._log("reading", error)
            else:
                await asyncio.to_thread(self.give, figures)
                await asyncio.sleep(every_s / 2)
                await asyncio.to_thread(self.give, figures)

    def give(self, figures: Figures) -> None:
        for door in self._doors:
            try:
                door.give(figures)
            except Exception as error:  # noqa: BLE001 - a collector's or Ray's error must not end the service
                self._log(type(door).__name__, error)

    def _log(self, place: str, error: Exception) -> None:
        if (kind := (place, type(error).__name__)) not in self._logged:
            self._logged.add(kind)
            logging.getLogger(__name__).error("metrics, %s: %s", place, one_line(error), exc_info=error)


def doors_of(process: str, otlp: bool, read: Callable[[], Figures]) -> MetricsDoors:
    """Returns the exporters of a process: Ray's endpoint, and an OpenTelemetry collector if `otlp`. `process`: one of
    PROCESSES.
    """
    from tailrace.deployments.metrics.ray_door import RayDoor

    metrics = PROCESSES[process]
    doors: list[Door] = [RayDoor(metrics)]
    if otlp:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        from tailrace.deployments.metrics.meters import OtlpDoor

        doors.append(OtlpDoor(f"tailrace-{process}", metrics, OTLPMetricExporter()))
    return MetricsDoors(doors, read)
