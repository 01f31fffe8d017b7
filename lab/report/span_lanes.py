"""Lanes of spans within their replica's row, and the span from which each sample came. Used by pages and pictures."""

from collections.abc import Sequence

from tailrace.lab.simulator.types import Span


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """Returns the lane of each span. `spans` are sorted by replica, then by time. A sample continues in its lane if
    that lane is free, otherwise in the first free one. No two spans of a replica overlap in a lane.
    """
    found: list[int] = []
    replica, free_s, lane_of = None, [], {}
    for span in spans:
        if span.replica != replica:
            replica, free_s, lane_of = span.replica, [], {}
        lane = lane_of.get(span.sample_id)
        if lane is None or free_s[lane] > span.begin_s:
            lane = next((at for at, until_s in enumerate(free_s) if until_s <= span.begin_s), len(free_s))
        if lane == len(free_s):
            free_s.append(0.0)
        free_s[lane] = span.end_s
        lane_of[span.sample_id] = lane
        found.append(lane)
    return found


def sources_of(spans: Sequence[Span]) -> list[int | None]:
    """Returns for each span the place of its source, a span of the same sample on another replica, or None. A span that
    begins while an earlier one runs is a copy of it; other spans continue the one before. No sample continues from a
    loser of a race.
    """
    found: list[int | None] = [None] * len(spans)
    first = kept = None  # the one that others copy; the last that did not lose
    for place in sorted(range(len(spans)), key=lambda at: (spans[at].sample_id, spans[at].begin_s, at)):
        span = spans[place]
        if kept is None or spans[kept].sample_id != span.sample_id:
            first = kept = None
        copies = first is not None and span.begin_s < spans[first].end_s
        source = first if copies else kept
        if source is not None and spans[source].replica != span.replica:
            found[place] = source
        if not copies:
            first = place
        if kept is None or span.role != "lost":
            kept = place
    return found
