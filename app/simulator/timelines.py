"""The spans of runs as the page's timelines read them: columns of little-endian integers in base64, and their key.

A page carries at most MOST_SPANS spans, shared evenly by its runs. Of a run with more, spans of one sample and role
that touch on a replica are joined; of those the longest are kept, and the page says how much of all span time they
hold. Times are in 65,535ths of the longest makespan, so that all runs share one axis; spans stand by replica, so that
`offsets` finds a replica's.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from app.simulator.types import Run, Span

MOST_SPANS = 150_000
"""Of 13 bytes each: 2.6 MB of base64."""

ROLES = ("generate", "prefill", "fetch", "race", "draft")
"""In the order of the style sheet's colours r0 to r4; another role has r5."""

TICKS = 65_535


def timelines(runs: Mapping[str, Run], shown: Mapping[str, Sequence[Span]]) -> dict:
    """The data block of a page: every value JSON, every id a string of its `samples`. `shown`: the spans of each run
    that are drawn, as `drawable` gives them."""
    samples = sorted({span.sample_id for spans in shown.values() for span in spans})
    roles = [*ROLES, *sorted({span.role for spans in shown.values() for span in spans} - set(ROLES))]
    horizon_s = longest_makespan_s(runs)
    places = {sample_id: index for index, sample_id in enumerate(samples)}
    first = next(iter(runs.values()))
    last = max(first.ended, key=lambda sample: (sample.ended_s, sample.sample_id), default=None)
    return {
        "horizon_s": horizon_s,
        "ticks": TICKS,
        "roles": roles,
        "samples": samples,
        "marked": places.get(last.sample_id, -1) if last else -1,
        "runs": [_columns(name, run, shown[name], places, roles, horizon_s) for name, run in runs.items()],
    }


def longest_makespan_s(runs: Mapping[str, Run]) -> float:
    return max(run.makespan_s for run in runs.values())


def drawable(runs: Mapping[str, Run], most: int = MOST_SPANS) -> dict[str, list[Span]]:
    """At most `most` spans of all runs together, by the rule at the head of this file, by replica and then by time."""
    gap_s = longest_makespan_s(runs) / TICKS
    return {name: _drawable(run.spans, most // len(runs), gap_s) for name, run in runs.items()}


def _drawable(spans: Sequence[Span], most: int, gap_s: float) -> list[Span]:
    if len(spans) > most:
        spans = joined(spans, gap_s)
    if len(spans) > most:
        spans = sorted(spans, key=lambda span: (span.begin_s - span.end_s, *_place(span)))[:most]
    return sorted(spans, key=_place)


def joined(spans: Sequence[Span], gap_s: float) -> list[Span]:
    """Spans of the same replica, sample and role with no more than gap_s between them made one."""
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
    """How much of the time of all spans those shown hold."""
    return sum(span.end_s - span.begin_s for span in shown) / (sum(span.end_s - span.begin_s for span in spans) or 1.0)


def _place(span: Span) -> tuple:
    return span.replica, span.begin_s, span.end_s, span.sample_id, span.role


def _columns(name: str, run: Run, spans: list[Span], places: dict, roles: list[str], horizon_s: float) -> dict:
    replicas = sorted({span.replica for span in spans})
    held = {replica: 0 for replica in replicas}
    for span in spans:
        held[span.replica] += 1
    scale = TICKS / (horizon_s or 1.0)
    return {
        "system": name,
        "makespan_s": run.makespan_s,
        "bounds": {key.removesuffix("_s"): value for key, value in run.bounds.items() if key != "best_s"},
        "replicas": replicas,
        "offsets": [0, *accumulate(held.values())],
        "sample": _packed([places[span.sample_id] for span in spans], "<u4"),
        "role": _packed([roles.index(span.role) for span in spans], "<u1"),
        "begin": _packed([min(TICKS, round(span.begin_s * scale)) for span in spans], "<u2"),
        "end": _packed([min(TICKS, round(span.end_s * scale)) for span in spans], "<u2"),
        "tokens": _packed([span.tokens for span in spans], "<u4"),
    }


def _packed(numbers: list[int], kind: str) -> str:
    return b64encode(np.array(numbers, dtype=kind).tobytes()).decode()
