"""Figures of a recorded run: one mapping, for `--json`, and rows for tables. Times in seconds.

Called by `tailrace timeline` and by the page.
"""

from collections import Counter
from collections.abc import Sequence
from math import inf

from tailrace.lab.report.span_columns import Band
from tailrace.lab.simulator.report import busy_seconds, number, summary
from tailrace.lab.simulator.types import Span
from tailrace.lab.timeline.chunks import COUNTS, OWNER, RecordedChunk, RecordedSample
from tailrace.lab.timeline.record import Record
from tailrace.lab.timeline.replica_states import ROLES, role_seconds

TAKEN = ("samples", "tokens", "makespan_s", "tail_s", "tail_share", "tokens_per_s", "replica_s", "chunks", "moves")
"""Keys taken from the simulator's report of a run."""

LONGEST = 12
"""Number of samples in the table of the longest samples."""

MOST_STAYS = 8
"""Maximum number of stays of one sample in the table of the longest samples."""


def figures(record: Record, bands: list[Band]) -> dict:
    """Returns the figures. `replica_s`: replica-seconds up, from the first submission to the end of the last sample.

    `busy_share`: share of a replica's seconds up in which a chunk ran, with or without tokens. `role_s`:
    replica-seconds by role. `wins`: races won by draft method; `owner` stands for a winner that names no method.
    `weights`: the versions, with the seconds at which they arrived. Tokens of drafts and KV are those of all chunks:
    see `tokens_of`.
    """
    said = summary(record.run)
    replicas = of_replicas(record, bands)
    return {
        **{key: said[key] for key in TAKEN},
        **tokens_of(record.chunks),
        "weights": [{"at_s": round(at_s, 3), "version": version} for at_s, version in record.weights],
        "role_s": {role: round(sum(one[role] for one in replicas.values()), 3) for role in ROLES},
        "replicas": replicas,
        "races": [race.as_json(record.names) for race in record.races],
        "wins": wins(record),
        "unended": unended(record),
        "dropped_entries": record.dropped,
    }


def of_replicas(record: Record, bands: list[Band]) -> dict[str, dict]:
    """Returns for each replica id: up_s, busy_share (None: never up), tokens made, tokens of drafts and KV, and seconds
    in each role.
    """
    seconds = role_seconds(bands)
    spans, chunks = [[] for _ in record.names], [[] for _ in record.names]
    for span in record.run.spans:
        spans[span.replica].append(span)
    for chunk in record.chunks:
        chunks[chunk.replica].append(chunk)
    found = {}
    for index, name in enumerate(record.names):
        up_s = sum(lifetime.end_s - lifetime.begin_s for lifetime in record.lifetimes[index])
        share = round(busy_seconds(spans[index]) / up_s, 4) if up_s else None
        roles = {role: round(seconds[index, role], 3) for role in ROLES}
        made = {"tokens": sum(chunk.new_tokens for chunk in chunks[index]), **tokens_of(chunks[index])}
        found[name] = {"up_s": round(up_s, 3), "busy_share": share, **made, **roles}
    return found


def tokens_of(chunks: Sequence[RecordedChunk]) -> dict:
    """Returns draft tokens and the accepted share of them; the acceptance length, in tokens per engine step; and the
    context tokens whose KV was pulled from the pool, or computed. A share or length is None if there is nothing to
    divide by.
    """
    sums = {name: sum(getattr(chunk, name) for chunk in chunks) for name in COUNTS}
    verified = sum(chunk.new_tokens for chunk in chunks if chunk.verifications)
    return {
        "drafted_tokens": sums["drafted_tokens"],
        "accepted_tokens": sums["accepted_tokens"],
        "accepted_share": _share(sums["accepted_tokens"], sums["drafted_tokens"]),
        "acceptance_length": _share(verified, sums["verifications"]),
        "pulled_tokens": sums["pulled_tokens"],
        "computed_tokens": sums["computed_tokens"],
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def wins(record: Record) -> dict[str, int]:
    """Returns the number of races won, by draft method."""
    won = Counter(race.winner.method or OWNER for race in record.races if race.winner is not None)
    return dict(sorted(won.items()))


def seconds(value: float) -> str:
    """Returns seconds to hundredths: the times of a journal are less exact than that."""
    return number(round(value, 2))


def unended(record: Record) -> int:
    """Returns the number of samples whose end the journal does not hold."""
    return sum(sample.ended_s is None for sample in record.samples.values())


def longest(record: Record) -> list[list[str]]:
    """Returns a table of the samples with most tokens; its first row has the column heads. A sample waits while it
    neither runs nor is between two turns."""
    table = [["sample", "tokens", "a step", "first runs s", "ends s", "waits s", "chunks", "moves", "ran on", "end"]]
    ordered = sorted(record.samples.items(), key=lambda item: (-item[1].tokens, -(item[1].ended_s or inf), item[0]))
    for sample_id, sample in ordered[:LONGEST]:
        ran_s = busy_seconds(
            [
                Span(replica=0, sample_id=sample_id, role="", begin_s=chunk.begin_s, end_s=chunk.end_s, tokens=0)
                for chunk in sample.chunks
            ]
        )
        end_s = sample.ended_s if sample.ended_s is not None else record.run.makespan_s
        first_s = min((chunk.begin_s for chunk in sample.chunks), default=end_s)
        times = (first_s, end_s, max(0.0, end_s - sample.submitted_s - ran_s - sample.held_s(end_s)))
        length = tokens_of(sample.chunks)["acceptance_length"]
        cells = [sample.tokens, length, *(round(one, 2) for one in times), len(sample.chunks), sample.moves]
        table.append([sample_id, *map(number, cells), _ran_on(record, sample), sample.end or "runs on"])
    return table


def _ran_on(record: Record, sample: RecordedSample) -> str:
    """Returns the replicas of a sample in order, one for each stay; a copy is named after a `+`, with its method."""
    stays: list[str] = []
    for chunk in sample.chunks:
        name = record.names[chunk.replica]
        if chunk.is_copy:
            stays.append(f"+{name} ({chunk.method or 'copy'}{', won' if chunk.won else ''})")
        elif not stays or stays[-1] != name:
            stays.append(name)
    return " ".join(stays[:MOST_STAYS]) + (f" and {len(stays) - MOST_STAYS} more" if len(stays) > MOST_STAYS else "")
