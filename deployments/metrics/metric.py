"""One metric: its name, kind and labels with all their values; and figures, the values of many metrics at one moment.

Invariant: a label has the values that its metric names, and `other` for all else, so no caller can create series.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

OTHER = "other"

ANY: tuple[str, ...] = ()
"""Values of a label that code bounds elsewhere: the routes of an application, its statuses."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False, slots=True)
class Metric:
    """`name`: as in Prometheus, a counter's without `_total`. `labels`: values by label. `bounds`: upper bounds of a
    histogram's buckets, rising. `unit`: in UCUM, as OpenTelemetry uses it.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()
    unit: str = "1"

    @property
    def series(self) -> str:
        """Name of its series in Prometheus; a histogram's without `_bucket`, `_sum`, `_count`."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    def all_series(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields the names of its series, each with the labels that it has besides the metric's."""
        if self.kind is not Kind.HISTOGRAM:
            yield self.series, ()
        else:
            yield f"{self.name}_bucket", ("le",)
            yield f"{self.name}_sum", ()
            yield f"{self.name}_count", ()

    def row(self, *values: str) -> tuple[str, ...]:
        """Returns these values of its labels, in order, with `other` for one that it does not name."""
        known = self.labels.values()
        return tuple(one if not of or one in of else OTHER for one, of in zip(values, known, strict=True))


class Distribution:
    """Counts of values by bucket, the last of which is for values above all bounds; and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...], counts: list[int] | None = None, total: float = 0.0):
        self.bounds, self.sum = bounds, total
        self.counts = counts or [0] * (len(bounds) + 1)

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

    def copy(self) -> "Distribution":
        return Distribution(self.bounds, list(self.counts), self.sum)


Figures = Mapping[str, Mapping[tuple[str, ...], float | Distribution]]
"""Values by name of the metric and values of its labels. Counters and distributions count from the start of the
process.
"""
