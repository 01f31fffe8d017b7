"""One metric: its name, kind and labels with all their values; and the counts of a histogram.

Invariant: a label has the values that its metric names, and `other` for all else, so no caller can create series.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

OTHER = "other"

ANY: tuple[str, ...] = ()
"""Values of a label that code bounds elsewhere: the routes of an application, its statuses."""

FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}

UNITS = {"seconds": "s", "bytes": "By"}
"""Units in UCUM, as OpenTelemetry uses it, by the last word of a metric's name."""


def unit_of(name: str) -> str:
    """Returns the unit of a metric; `1` for a number of things."""
    return UNITS.get(name.rpartition("_")[2], "1")


class Distribution:
    """Counts of values by bucket, the last of which is for values above all bounds; and their sum.

    Plain numbers, since they are counted on hot paths: prometheus_client's histogram takes one value at a time, under a
    lock.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.sum = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_all(self, values: Sequence[float]) -> None:
        places = np.searchsorted(self.bounds, values, side="left")
        for place, count in enumerate(np.bincount(places, minlength=len(self.counts)).tolist()):
            self.counts[place] += count
        self.sum += float(np.sum(values))

    def cumulated(self) -> Iterator[tuple[str, int]]:
        """Yields the buckets as Prometheus has them: (upper bound, number of values up to it)."""
        return zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True)


Rows = Mapping[tuple[str, ...], float | Distribution]
"""Values by the values of a metric's labels. Counters and distributions count from the start of the process."""


@dataclass(frozen=True, eq=False, slots=True)
class Metric:
    """`name`: as in Prometheus, a counter's without `_total`. `kind`: one of FAMILIES. `labels`: values by label.
    `bounds`: upper bounds of a histogram's buckets, rising.
    """

    name: str
    kind: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        return unit_of(self.name)

    @property
    def series(self) -> str:
        """Name of its series in Prometheus; a histogram's without `_bucket`, `_sum`, `_count`."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def row(self, *values: str) -> tuple[str, ...]:
        """Returns these values of its labels, in order, with `other` for one that it does not name."""
        known = self.labels.values()
        return tuple(one if not of or one in of else OTHER for one, of in zip(values, known, strict=True))

    def counted(self, counts: Mapping[str, float]) -> Rows:
        """Returns the rows of a metric with one label: every value of it, 0 where there is none; other values
        together.
        """
        (values,) = self.labels.values()
        rows = {(value,): 0 for value in values}
        for value, count in counts.items():
            row = self.row(value)
            rows[row] = rows.get(row, 0) + count
        return rows

    def family(self, rows: Rows, constant: Mapping[str, str] | None = None) -> Family:
        """Returns the metric with its values. `constant`: further labels of every row, with their values."""
        constant = constant or {}
        family = FAMILIES[self.kind](self.name, self.help, labels=(*constant, *self.labels))
        for values, value in rows.items():
            labels = (*constant.values(), *values)
            if isinstance(value, Distribution):
                family.add_metric(labels, buckets=list(value.cumulated()), sum_value=value.sum)
            else:
                family.add_metric(labels, value)
        return family
