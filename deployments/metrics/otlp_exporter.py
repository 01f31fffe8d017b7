"""Exports metrics to an OpenTelemetry collector: families of prometheus_client as OpenTelemetry's cumulative data."""

import time
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from tailrace.deployments.metrics.metric import unit_of

SCOPE = InstrumentationScope("tailrace")
CUMULATIVE = AggregationTemporality.CUMULATIVE


class OtlpExporter:
    """Sends to the collector that the OTEL_* variables name; `exporter` itself reads them. `service`: the name of the
    process's kind, as in spans.
    """

    def __init__(self, service: str, exporter: MetricExporter):
        self._exporter, self._resource = exporter, Resource.create({"service.name": service})
        self._began_ns = time.time_ns()

    def export(self, families: Iterable[Family]) -> None:
        metrics = [
            Metric(one.name, one.documentation, unit_of(one.name), self._data(one, time.time_ns())) for one in families
        ]
        scope = ScopeMetrics(SCOPE, metrics, schema_url="")
        self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")]))

    def _data(self, family: Family, now_ns: int) -> Sum | Gauge | Histogram:
        if family.type == "histogram":
            return Histogram(list(self._histograms(family, now_ns)), CUMULATIVE)
        is_sum = family.type == "counter"
        points = [
            NumberDataPoint(one.labels, self._began_ns if is_sum else None, now_ns, one.value) for one in family.samples
        ]
        return Sum(points, CUMULATIVE, is_monotonic=True) if is_sum else Gauge(points)

    def _histograms(self, family: Family, now_ns: int) -> Iterator[HistogramDataPoint]:
        """Yields a point for each histogram: a run of buckets, then its count and its sum."""
        for labels, samples in groupby(family.samples, _labels):
            *buckets, count, total = samples
            yield HistogramDataPoint(
                attributes=dict(labels),
                start_time_unix_nano=self._began_ns,
                time_unix_nano=now_ns,
                count=count.value,
                sum=total.value,
                bucket_counts=[value - before for before, value in pairwise((0, *(one.value for one in buckets)))],
                explicit_bounds=[float(one.labels["le"]) for one in buckets[:-1]],
                min=None,
                max=None,
            )


def _labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    """Returns the labels of a histogram that a sample belongs to."""
    return tuple((name, value) for name, value in sample.labels.items() if name != "le")
