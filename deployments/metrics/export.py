"""Exports metrics every EXPORT_S: collected on the event loop, sent from a thread.

Invariant: an error of an exporter, or of the reading, is logged once a kind; it ends neither the loop nor the other
exporters. Called by the coordinator and the gateway.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client.metrics_core import Metric as Family

from tailrace.deployments.messages.errors import one_line

EXPORT_S = 10.0
"""Seconds between two readings. Each is sent twice: every 10 s Ray sends the gauges that were set since, and its page
drops one that was not sent for 20 s.
"""


class Exporter(Protocol):
    """A way for metrics out of the process."""

    def export(self, families: Iterable[Family]) -> None: ...


class MetricsExport:
    """All exporters of a process. `collect`: reads the metrics."""

    def __init__(self, exporters: Sequence[Exporter], collect: Callable[[], Iterable[Family]]):
        self._exporters, self._collect = exporters, collect
        self._logged: set[tuple[str, str]] = set()

    async def run(self, every_s: float = EXPORT_S) -> None:
        """Exports again and again. Never returns."""
        while True:
            await asyncio.sleep(every_s / 2)
            try:
                families = list(self._collect())
            except Exception as error:  # noqa: BLE001 - a defect of ours here must not end the service
                self._log("reading", error)
            else:
                await asyncio.to_thread(self.send, families)
                await asyncio.sleep(every_s / 2)
                await asyncio.to_thread(self.send, families)

    def send(self, families: Sequence[Family]) -> None:
        for exporter in self._exporters:
            try:
                exporter.export(families)
            except Exception as error:  # noqa: BLE001 - a collector's or Ray's error must not end the service
                self._log(type(exporter).__name__, error)

    def _log(self, place: str, error: Exception) -> None:
        if (kind := (place, type(error).__name__)) not in self._logged:
            self._logged.add(kind)
            logging.getLogger(__name__).error("metrics, %s: %s", place, one_line(error), exc_info=error)


def export_of(process: str, otlp: bool, collect: Callable[[], Iterable[Family]]) -> MetricsExport:
    """Returns the export of a process: to Ray's endpoint, and to an OpenTelemetry collector if `otlp`. `process`: the
    process's kind, as in spans.
    """
    from tailrace.deployments.metrics.ray_exporter import RayExporter

    exporters: list[Exporter] = [RayExporter()]
    if otlp:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        from tailrace.deployments.metrics.otlp_exporter import OtlpExporter

        exporters.append(OtlpExporter(f"tailrace-{process}", OTLPMetricExporter()))
    return MetricsExport(exporters, collect)
