"""The activity of each replica over time: bands of one role each, without a gap while the replica is up.

If several activities run at once, the first of ROLES counts: a replica that makes tokens of one sample and computes the
prompt of another generates. Figures, page and picture read these.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tailrace.lab.report.span_columns import Band
from tailrace.lab.timeline.chunks import RecordedChunk, ReplicaLifetime
from tailrace.lab.timeline.record import Record

ROLES = ("closing", "generate", "race", "prefill", "idle")
"""Activities of a replica. closing: about to leave. generate: makes tokens of a sample that runs nowhere else, or that
others copy. race: copies only. prefill: no chunk has made a token yet. idle: up without a chunk.
"""

WORDS = {
    "closing": "closing",
    "generate": "generates",
    "race": "races: copies only",
    "prefill": "prefills or waits",
    "idle": "idle",
}


def bands(record: Record) -> list[Band]:
    """Returns the bands by replica, then by time."""
    by_replica: list[list[RecordedChunk]] = [[] for _ in record.names]
    for chunk in record.chunks:
        by_replica[chunk.replica].append(chunk)
    return [
        band
        for number, lifetimes in enumerate(record.lifetimes)
        for lifetime in lifetimes
        for band in _of_lifetime(number, lifetime, by_replica[number])
    ]


def role_seconds(found: Iterable[Band]) -> Counter:
    """Returns seconds by (replica, role)."""
    seconds: Counter = Counter()
    for band in found:
        seconds[band.replica, band.role] += band.end_s - band.begin_s
    return seconds


def _of_lifetime(number: int, lifetime: ReplicaLifetime, chunks: Sequence[RecordedChunk]) -> list[Band]:
    changes = [(lifetime.begin_s, "idle", 1), (lifetime.end_s, "idle", 0)]
    if lifetime.closing_s is not None:
        changes.append((lifetime.closing_s, "closing", 1))
    for chunk in chunks:
        if lifetime.begin_s <= chunk.begin_s and chunk.end_s <= lifetime.end_s:
            for role, begin_s, end_s in _doings(chunk):
                changes += [(begin_s, role, 1), (end_s, role, -1)]
    changes.sort(key=lambda change: change[0])
    now: Counter = Counter()
    found: list[Band] = []
    for (at_s, role, by), (until_s, *_) in pairwise(changes):
        now[role] += by
        if until_s > at_s:
            _append(found, Band(number, next(role for role in ROLES if now[role] > 0), at_s, until_s))
    return found


def _doings(chunk: RecordedChunk) -> list[tuple[str, float, float]]:
    if chunk.is_copy:
        return [("race", chunk.begin_s, chunk.end_s)]
    return [("prefill", chunk.begin_s, chunk.silent_s), ("generate", chunk.silent_s, chunk.end_s)]


def _append(found: list[Band], band: Band) -> None:
    if found and found[-1].role == band.role:
        found[-1] = found[-1]._replace(end_s=band.end_s)
    else:
        found.append(band)
