"""Spans of runs in the form that the page's timelines read: columns of little-endian integers in base64, and a key.

A page has at most MOST_SPANS spans, divided evenly among its runs. If a run has more, spans of one sample and role that
touch on a replica are joined. If there are still too many, the longest are kept, and the page states their share of all
span time. Times are in 65,535ths of the longest makespan, so that all runs share one axis. Spans are sorted by replica,
and `offsets` gives the place of each replica's first span.
"""

from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tailrace.app.style import palette
from tailrace.lab.report.span_lanes import lanes_of, sources_of
from tailrace.lab.simulator.types import SimulatedRun, Span

MOST_SPANS = 150_000
"""Maximum number of spans of a page: at 19 bytes each, 3.8 MB of base64. With notes a span has 23 bytes."""

ROLES = palette.SPANS
"""Roles in the order of the style sheet's colours r0 to r6; another role has r7."""

BANDS = palette.STRIPS
"""Activities of a whole replica, in the order of the style sheet's colours b0 to b5."""

TICKS = 65_535


class Band(NamedTuple):
    """The activity of a whole replica, one of BANDS, from begin_s to end_s."""

    replica: int
    role: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Rows:
    """Parts of a run's timeline besides its spans. `names`: names of the rows; a span's replica is the number of its
    row. `bands`: the activity of each replica. `tails`: (begin_s, end_s) of the run's tails. `last`: ids of the samples
    that ended in tails.
    """

    names: Sequence[str]
    bands: Sequence[Band]
    tails: Sequence[tuple[float, float]]
    last: Collection[str]


def timelines(
    runs: Mapping[str, SimulatedRun], shown: Mapping[str, Sequence[Span]], rows: Mapping[str, Rows] | None = None
) -> dict:
    """Returns the data block of a page: every value is JSON, every id a string of its `samples`. `shown`: the spans of
    each run that are drawn, as `drawable` returns them. Without `rows` a run has a row for each replica with a span,
    and colours go by role instead of by sample.
    """
    samples = sorted({span.sample_id for spans in shown.values() for span in spans})
    roles = [*ROLES, *sorted({span.role for spans in shown.values() for span in spans} - set(ROLES))]
    horizon_s = longest_makespan_s(runs)
    places = {sample_id: index for index, sample_id in enumerate(samples)}
    notes = {note: place for place, note in enumerate(sorted({span.note for of in shown.values() for span in of}))}
    first = next(iter(runs.values()))
    last = max(first.ended, key=lambda sample: (sample.ended_s, sample.sample_id), default=None)
    return {
        "horizon_s": horizon_s,
        "ticks": TICKS,
        "roles": roles,
        "bands": BANDS,
        "samples": samples,
        "notes": list(notes),
        "colour": "sample" if rows else "role",
        "last": sorted({places[one] for of_run in (rows or {}).values() for one in of_run.last if one in places}),
        "marked": places.get(last.sample_id, -1) if last and not rows else -1,
        "runs": [
            _columns(run, shown[name], places, roles, horizon_s)
            | ({"note": _packed([notes[span.note] for span in shown[name]], "<u4")} if any(notes) else {})
            | {"system": name}
            | (_rows(rows[name], shown[name], horizon_s) if rows else {})
            for name, run in runs.items()
        ],
    }


def longest_makespan_s(runs: Mapping[str, SimulatedRun]) -> float:
    return max(run.makespan_s for run in runs.values())


def drawable(runs: Mapping[str, SimulatedRun], most: int = MOST_SPANS) -> dict[str, list[Span]]:
    """Returns at most `most` spans of all runs together, chosen as the module's docstring says, sorted by replica and
    time.
    """
    gap_s = longest_makespan_s(runs) / TICKS
    return {name: _drawable(run.spans, most // len(runs), gap_s) for name, run in runs.items()}


def _drawable(spans: Sequence[Span], most: int, gap_s: float) -> list[Span]:
    if len(spans) > most:
        spans = joined(spans, gap_s)
    if len(spans) > most:
        spans = sorted(spans, key=lambda span: (span.begin_s - span.end_s, *_place(span)))[:most]
    return sorted(spans, key=_place)


def joined(spans: Sequence[Span], gap_s: float) -> list[Span]:
    """Joins spans of the same replica, sample and role with no more than gap_s between them."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.replica, span.sample_id, span.role, span.begin_s, span.end_s)):
        before = found[-1] if found else None
        if before and before[:3] == span[:3] and span.begin_s - before.end_s <= gap_s:
            end_s, verifications = max(before.end_s, span.end_s), before.verifications + span.verifications
            tokens = before.tokens + span.tokens
            found[-1] = before._replace(end_s=end_s, tokens=tokens, verifications=verifications)
        else:
            found.append(span)
    return found


def held_share(shown: Sequence[Span], spans: Sequence[Span]) -> float:
    """Returns the share of all spans' time that the shown spans hold."""
    return sum(span.end_s - span.begin_s for span in shown) / (sum(span.end_s - span.begin_s for span in spans) or 1.0)


def _place(span: Span) -> tuple:
    return span.replica, span.begin_s, span.end_s, span.sample_id, span.role


def _columns(run: SimulatedRun, spans: Sequence[Span], places: dict, roles: list[str], horizon_s: float) -> dict:
    replicas = sorted({span.replica for span in spans})
    return {
        "makespan_s": run.makespan_s,
        "bounds": {key.removesuffix("_s"): value for key, value in run.bounds.items() if key != "best_s"},
        "replicas": replicas,
        "offsets": _offsets(replicas, spans),
        "sample": _packed([places[span.sample_id] for span in spans], "<u4"),
        "role": _packed([roles.index(span.role) for span in spans], "<u1"),
        "tokens": _packed([span.tokens for span in spans], "<u4"),
        "lane": _packed(lanes_of(spans), "<u2"),
        "source": _packed([0 if source is None else source + 1 for source in sources_of(spans)], "<u4"),
        **_times(spans, horizon_s),
    }


def _rows(rows: Rows, spans: Sequence[Span], horizon_s: float) -> dict:
    numbers = range(len(rows.names))
    by_replica = sorted(rows.bands)
    return {
        "replicas": list(rows.names),
        "offsets": _offsets(numbers, spans),
        "tails": list(rows.tails),
        "bands": {
            "offsets": _offsets(numbers, by_replica),
            "role": _packed([BANDS.index(band.role) for band in by_replica], "<u1"),
            **_times(by_replica, horizon_s),
        },
    }


def _offsets(replicas: Iterable[int], items: Sequence[Span] | Sequence[Band]) -> list[int]:
    """Returns the index of each replica's first item among items sorted by replica, and the number of items."""
    held = Counter(item.replica for item in items)
    return [0, *accumulate(held[replica] for replica in replicas)]


def _times(items: Sequence[Span] | Sequence[Band], horizon_s: float) -> dict:
    scale = TICKS / (horizon_s or 1.0)
    return {
        "begin": _packed([min(TICKS, round(item.begin_s * scale)) for item in items], "<u2"),
        "end": _packed([min(TICKS, round(item.end_s * scale)) for item in items], "<u2"),
    }


def _packed(numbers: list[int], kind: str) -> str:
    return b64encode(np.array(numbers, dtype=kind).tobytes()).decode()
