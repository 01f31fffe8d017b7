"""Exports metrics through Ray's own endpoint for Prometheus, a page of each node's agent.

All are exported as gauges that hold the whole count, under the names that Prometheus has for counters and histograms.
Ray 2.60's own counters send differences, of which one may be lost; they have no 0, and keep series of an ended process
for ever; its histograms compute a sum from the middles of the buckets. Ray puts `ray_` before each name, which
monitoring/prometheus.yml removes. On a cluster without Ray's metrics a call does nothing.
"""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric as Family
from ray.util.metrics import Gauge


class RayExporter:
    """A gauge for each name of a series, made at its first value."""

    def __init__(self):
        self._gauges: dict[str, Gauge] = {}

    def export(self, families: Iterable[Family]) -> None:
        for family in families:
            for sample in family.samples:
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(sample.name, family.documentation, tuple(sample.labels))
                self._gauges[sample.name].set(sample.value, sample.labels)
