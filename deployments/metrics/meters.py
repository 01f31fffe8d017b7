"""OpenTelemetry's meters of one process: an observable instrument for each counter and gauge, read from figures.

OpenTelemetry has no observable histogram, so the histograms of the figures are added to the instruments' data as
points.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    MetricExporter,
    MetricsData,
)
from opentelemetry.sdk.metrics.export import Metric as Exported
from opentelemetry.sdk.resources import Resource

from tailrace.deployments.metrics.metric import Distribution, Figures, Kind, Metric

METER = "tailrace"


class Meters:
    """`service`: the name of the process's kind, as in spans. `metrics`: those that it exports."""

    def __init__(self, service: str, metrics: Sequence[Metric]):
        self._figures: Figures = {}
        self._began_ns = time.time_ns()
        self._histograms = [one for one in metrics if one.kind is Kind.HISTOGRAM]
        self._reader = InMemoryMetricReader()
        resource = Resource.create({"service.name": service})
        self._provider = MeterProvider([self._reader], resource=resource, shutdown_on_exit=False)
        meter = self._provider.get_meter(METER)
        make = {Kind.COUNTER: meter.create_observable_counter, Kind.GAUGE: meter.create_observable_gauge}
        for metric in metrics:
            if metric.kind in make:
                make[metric.kind](metric.name, [partial(self._observe, metric)], metric.unit, metric.help)

    def _observe(self, metric: Metric, _: CallbackOptions) -> Iterator[Observation]:
        for values, value in self._figures.get(metric.name, {}).items():
            yield Observation(value, dict(zip(metric.labels, values, strict=True)))

    def collect(self, figures: Figures) -> MetricsData:
        """Reads all instruments once, in OpenTelemetry's cumulative form."""
        self._figures = figures
        data = self._reader.get_metrics_data()
        (resource,) = data.resource_metrics
        (scope,) = resource.scope_metrics
        made = [self._exported(one, figures[one.name]) for one in self._histograms if one.name in figures]
        scope = replace(scope, metrics=[*scope.metrics, *made])
        return MetricsData([replace(resource, scope_metrics=[scope])])

    def _exported(self, metric: Metric, rows: dict[tuple[str, ...], Distribution]) -> Exported:
        points = [
            HistogramDataPoint(
                attributes=dict(zip(metric.labels, values, strict=True)),
                start_time_unix_nano=self._began_ns,
                time_unix_nano=time.time_ns(),
                count=found.count,
                sum=found.sum,
                bucket_counts=found.counts,
                explicit_bounds=found.bounds,
                min=None,
                max=None,
            )
            for values, found in rows.items()
        ]
        return Exported(metric.name, metric.help, metric.unit, Histogram(points, AggregationTemporality.CUMULATIVE))


class OtlpDoor:
    """Sends to the collector that the OTEL_* variables name; the exporter itself reads them."""

    def __init__(self, service: str, metrics: Sequence[Metric], exporter: MetricExporter):
        self._meters, self._exporter = Meters(service, metrics), exporter

    def give(self, figures: Figures) -> None:
        self._exporter.export(self._meters.collect(figures))
