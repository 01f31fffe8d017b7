"""Tables of one sample's log and of one batch's. Pure: values in, rich renderables out."""

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tailrace.app.watch.tables import plain_table
from tailrace.deployments.messages.status import BatchLog, ChunkLog, FaultLog, SampleLog


def sample_view(log: SampleLog, now_s: float) -> RenderableType:
    """Returns the view of a sample. `now_s`: unix seconds."""
    return Group(Text(log.sample_id, style="bold"), Text(said_of(log)), "", chunks_table(log, now_s))


def said_of(log: SampleLog) -> str:
    """Returns one line on a sample."""
    words = [f"{log.state}{f', {log.end}' if log.end else ''}: {log.why}" if log.why else log.state]
    if log.error:
        words.append(log.error)
    expected = "" if log.expected_tokens is None else f" of about {log.expected_tokens:,}, {log.max_tokens:,} at most"
    words.append(f"{log.tokens:,} tokens{expected}")
    words.append(f"{log.dropped + len(log.chunks):,} chunks, {log.moves:,} moves")
    return "; ".join(words)


def chunks_table(log: SampleLog, now_s: float) -> Table:
    table = plain_table("chunk", "replica", "began", "seconds", "from", "tokens", "end", "reason",
                        words=("replica", "began", "end", "reason"), wrapped="reason")  # fmt: skip
    for place, chunk in enumerate(log.chunks, start=log.dropped + 1):
        until_s = now_s if chunk.ended_s is None else chunk.ended_s
        table.add_row(
            f"{place:,}",
            chunk.replica_id,
            clock(chunk.began_s),
            f"{max(0.0, until_s - chunk.began_s):,.1f}",
            f"{chunk.start:,}",
            "" if chunk.ended_s is None else f"{chunk.new_tokens:,}",
            Text(chunk.end or "runs", style="red" if chunk.error else ""),
            Text(reason_of(chunk)),
        )
    return table


def reason_of(chunk: ChunkLog) -> str:
    """Returns why the chunk ran there; for a copy, with which method; why it was asked to stop; its error."""
    race = f"races {chunk.copy_of} with {chunk.method}" if chunk.copy_of else ""
    asked = f"asked to stop: {chunk.asked}" if chunk.asked else ""
    return "; ".join(word for word in (chunk.reason, race, asked, chunk.error) if word)


def batch_view(log: BatchLog, now_s: float) -> RenderableType:
    """Returns the view of a batch. `now_s`: unix seconds."""
    parts: list[RenderableType] = [Text(log.batch_id, style="bold"), Text(batch_said(log)), ""]
    if log.faults:
        parts += [faults_table(log.faults), ""]
    return Group(*parts, samples_table(log.samples))


def batch_said(log: BatchLog) -> str:
    """Returns one line on a batch."""
    words = [", ".join(f"{count:,} {name}" for name, count in sorted(log.counts.items())) or "no samples yet"]
    words.append(f"{log.chunks:,} chunks, {log.moves:,} moves")
    if log.status is None:
        return "; ".join(["over", *words])
    status = log.status
    words.append(f"{status.emitted:,} of {status.groups:,} groups handed out, {status.tokens:,} tokens")
    words.append(f"{status.seconds:,.0f} s{', in its tail' if status.tail else ''}")
    return "; ".join(words)


def faults_table(faults: Sequence[FaultLog]) -> Table:
    table = plain_table("fault at", "sample", "replica", "error", words=("sample", "replica", "error"), wrapped="error")
    for fault in faults:
        table.add_row(clock(fault.at_s), Text(short(fault.sample_id)), fault.replica_id, Text(fault.text))
    return table


def samples_table(samples: Sequence[SampleLog]) -> Table:
    """Returns the table of samples, by their names within the batch."""
    table = plain_table("sample", "state", "tokens", "chunks", "moves", "replica", "why",
                        words=("state", "replica", "why"), wrapped="why")  # fmt: skip
    for log in samples:
        last = log.chunks[-1].replica_id if log.chunks else "-"
        cells = f"{log.tokens:,}", f"{log.dropped + len(log.chunks):,}", f"{log.moves:,}"
        table.add_row(Text(short(log.sample_id)), log.end or log.state, *cells, last, Text(log.error or log.why))
    return table


def short(sample_id: str) -> str:
    """Returns a sample's name within its batch."""
    return sample_id.partition("/")[2]


def clock(at_s: float) -> str:
    """Returns unix seconds as the local time of day."""
    return f"{datetime.fromtimestamp(at_s):%H:%M:%S}"
