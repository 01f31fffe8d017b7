"""Exports figures through Ray's own endpoint for Prometheus, a page of each node's agent.

All are exported as gauges that hold the whole count, under the names that Prometheus has for counters and histograms.
Ray 2.60's own counters send differences, of which one may be lost; they have no 0, and keep series of an ended process
for ever; its histograms compute a sum from the middles of the buckets. Ray puts `ray_` before each name, which
monitoring/prometheus.yml removes. On a cluster without Ray's metrics a call does nothing.
"""

from collections.abc import Sequence

from ray.util.metrics import Gauge

from tailrace.deployments.metrics.metric import Distribution, Figures, Metric
from tailrace.deployments.metrics.text import cumulated


class RayDoor:
    """`metrics`: those that this process exports."""

    def __init__(self, metrics: Sequence[Metric]):
        self._metrics = metrics
        self._gauges = {
            name: Gauge(name, metric.help, (*metric.labels, *more))
            for metric in metrics
            for name, more in metric.all_series()
        }

    def give(self, figures: Figures) -> None:
        for metric in self._metrics:
            for values, value in figures.get(metric.name, {}).items():
                tags = dict(zip(metric.labels, values, strict=True))
                if isinstance(value, Distribution):
                    self._give_distribution(metric.name, tags, value)
                else:
                    self._gauges[metric.series].set(value, tags)

    def _give_distribution(self, name: str, tags: dict[str, str], found: Distribution) -> None:
        for bound, count in cumulated(found):
            self._gauges[f"{name}_bucket"].set(count, tags | {"le": bound})
        self._gauges[f"{name}_sum"].set(found.sum, tags)
        self._gauges[f"{name}_count"].set(found.count, tags)
