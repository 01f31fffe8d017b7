"""Points of a run's curves over simulated seconds. The page draws them."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from tailrace.lab.simulator.types import Ended, SimulatedRun, Span

LOOKS = 60
"""Number of stretches of the time axis over which tokens per verification are averaged: with fewer steps in a stretch
the curve would jump.
"""


def over_moments(run: SimulatedRun, field: str) -> list[tuple[float, float]]:
    """Returns the points of a field of the run's moments, to the makespan. A value holds until the next moment. If
    several moments are at one instant, the last one counts: the others held for no time.
    """
    points = list({moment.at_s: getattr(moment, field) for moment in run.moments}.items())
    return [*points, (run.makespan_s, points[-1][1])] if points else []


def ended_share(ended: Sequence[Ended]) -> list[tuple[float, float]]:
    """Returns the share of all samples that have ended, at each end; the first point is 0 at 0 s."""
    ends = sorted(sample.ended_s for sample in ended)
    return [(0.0, 0.0), *((at_s, (index + 1) / len(ends)) for index, at_s in enumerate(ends))]


def last_of(points: Sequence[tuple[float, float]], low: float) -> list[tuple[float, float]]:
    """Returns the part of a growing curve at or above `low`. The last point below `low`, raised to `low`, comes before
    it.
    """
    first = bisect_left(points, low, key=lambda point: point[1])
    return [*((x, low) for x, _ in points[max(0, first - 1) : first]), *points[first:]]


def acceptance(spans: Sequence[Span], horizon_s: float, looks: int = LOOKS) -> list[tuple[float, float]]:
    """Returns tokens per verification in each of `looks` equal stretches of 0 to horizon_s, at their middles. A span's
    tokens and verifications are spread evenly over its time. Stretches without a verification have no point.
    """
    counted = [span for span in spans if span.verifications > 0]
    return ratio_over_time([(s.begin_s, s.end_s, s.tokens, s.verifications) for s in counted], horizon_s, looks)


def ratio_over_time(
    counts: Sequence[tuple[float, float, float, float]], horizon_s: float, looks: int = LOOKS
) -> list[tuple[float, float]]:
    """Returns part over whole in `looks` equal stretches of 0 to horizon_s, at their middles. Stretches with nothing of
    the whole have no point.

    `counts`: (begin_s, end_s, part, whole), with part and whole spread evenly over the time.
    """
    counted = [one for one in counts if one[1] > one[0]]
    if not counted or not horizon_s:
        return []
    begin, end, part, whole = np.array(counted, dtype=float).T
    edges = np.linspace(0.0, horizon_s, looks + 1)
    done = [np.clip((edge - begin) / (end - begin), 0.0, 1.0) for edge in edges]
    made, of = (np.diff([share @ weights for share in done]) for weights in (part, whole))
    middles = (edges[1:] + edges[:-1]) / 2
    enough = of > 1e-9 * whole.sum()
    return [(float(x), float(a / b)) for x, a, b in zip(middles[enough], made[enough], of[enough], strict=True)]
