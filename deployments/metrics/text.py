"""Figures in Prometheus's text format. Called by the gateway's `GET /metrics`."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from tailrace.deployments.metrics.metric import Distribution, Figures, Kind, Metric

FAMILIES = {
    Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily
}  # fmt: skip


class _Page:
    """A collector of families, for prometheus_client."""

    def __init__(self, families: list[Family]):
        self._families = families

    def collect(self) -> Iterator[Family]:
        return iter(self._families)


def prometheus_text(metrics: Sequence[Metric], figures: Figures, constant: Mapping[str, str]) -> bytes:
    """Returns figures in Prometheus's text format. `constant`: labels of every series, with their values."""
    registry = CollectorRegistry()
    registry.register(_Page([family_of(one, figures, constant) for one in metrics if one.name in figures]))
    return generate_latest(registry)


def family_of(metric: Metric, figures: Figures, constant: Mapping[str, str]) -> Family:
    family = FAMILIES[metric.kind](metric.name, metric.help, labels=(*constant, *metric.labels))
    for values, value in figures[metric.name].items():
        labels = (*constant.values(), *values)
        if isinstance(value, Distribution):
            family.add_metric(labels, buckets=list(cumulated(value)), sum_value=value.sum)
        else:
            family.add_metric(labels, value)
    return family


def cumulated(found: Distribution) -> Iterator[tuple[str, int]]:
    """Yields the buckets as Prometheus has them: (upper bound, number of values up to it)."""
    total = 0
    for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
        total += count
        yield bound, total
