"""Figures through Ray's own endpoint for Prometheus, a page of each node's agent.

Ray 2.60 puts `ray_` before each name and `_total` after each counter, and reckons the sum of a histogram from the
middles of its buckets; so buckets, sums and counts go there as counters, and monitoring/prometheus.yml gives all of
them their names back. Invariant: a counter's growth goes to Ray once. Without Ray's metrics a call does nothing.
"""

from collections.abc import Iterator, Sequence

from ray.util.metrics import Counter, Gauge

from tailrace.deployments.metrics.metric import Distribution, Figures, Kind, Metric
from tailrace.deployments.metrics.text import cumulated

BUCKET, SUM, COUNT = "bucket", "sum", "count"


class RayDoor:
    """`metrics`: those that this process gives."""

    def __init__(self, metrics: Sequence[Metric]):
        self._metrics = metrics
        self._gauges, self._counters = {}, {}
        self._given: dict[tuple, float] = {}
        for one in metrics:
            labels = tuple(one.labels)
            if one.kind is Kind.GAUGE:
                self._gauges[one.name] = Gauge(one.name, one.help, labels)
            elif one.kind is Kind.COUNTER:
                self._counters[one.name] = Counter(one.name, one.help, labels)
            else:
                for part, more in ((BUCKET, ("le",)), (SUM, ()), (COUNT, ())):
                    self._counters[f"{one.name}_{part}"] = Counter(f"{one.name}_{part}", one.help, (*labels, *more))

    def give(self, figures: Figures) -> None:
        for metric in self._metrics:
            for values, value in figures.get(metric.name, {}).items():
                tags = dict(zip(metric.labels, values, strict=True))
                if metric.kind is Kind.GAUGE:
                    self._gauges[metric.name].set(value, tags)
                elif isinstance(value, Distribution):
                    for part, more, count in _parts(value):
                        self._count(f"{metric.name}_{part}", tags | more, count)
                else:
                    self._count(metric.name, tags, value)

    def _count(self, name: str, tags: dict[str, str], value: float) -> None:
        key = name, *tags.values()
        if (grown := value - self._given.get(key, 0)) > 0:  # Ray takes no 0
            self._given[key] = value
            self._counters[name].inc(grown, tags)


def _parts(found: Distribution) -> Iterator[tuple[str, dict[str, str], float]]:
    for bound, count in cumulated(found):
        yield BUCKET, {"le": bound}, count
    yield SUM, {}, found.sum
    yield COUNT, {}, found.count
