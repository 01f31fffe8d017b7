"""A recorded run in the Trace Event Format, which Perfetto opens: zoom, search and SQL over every chunk.

A replica is a process. Its threads are lanes of chunks, and one thread has the activity of the whole replica. Counters
and tails belong to a process `run`. An arrow leads from a chunk to the one that continues its sample.
Invariant: slices of a thread nest, and all times are whole nanoseconds from the first submission.
`tailrace timeline RUN --out x.perfetto.json` writes it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from tailrace.app.files.output_file import OutputKind
from tailrace.lab.report.span_columns import Band
from tailrace.lab.report.span_lanes import lanes_of
from tailrace.lab.simulator.report import tails
from tailrace.lab.simulator.types import Span
from tailrace.lab.timeline.chunks import COUNTS, RecordedChunk
from tailrace.lab.timeline.record import Record

TRACE = OutputKind(
    "a trace of `timeline --out`",
    (b'{"otherData": {"run": ', b'{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, '),
)

RUN = 1
"""Process number of the run; replicas have the numbers after that."""

LANE_THREADS = 10_000
"""Number of threads reserved for a replica: thread numbers are unique in the whole trace."""


def trace_events(title: str, record: Record, bands: Sequence[Band]) -> dict:
    """Returns the trace as JSON. Chunks have their counts, reasons and ends as arguments of their slices."""
    events = [
        *_named(record),
        *_chunks(record),
        *_activity(bands),
        *_run(record),
        *_counters(record),
    ]
    return {
        "otherData": {"run": title, "batches": record.run.workload, "dropped_entries": record.dropped},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def _named(record: Record) -> Iterator[dict]:
    yield _meta("process_name", RUN, "run")
    yield _meta("process_sort_index", RUN, 0, key="sort_index")
    for number, name in enumerate(record.names):
        yield _meta("process_name", _process(number), f"replica {name}")
        yield _meta("process_sort_index", _process(number), number + 1, key="sort_index")


def _meta(kind: str, process: int, value, thread: int | None = None, key: str = "name") -> dict:
    where = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    return {"ph": "M", "name": kind, **where, "args": {key: value}}


def _process(replica: int) -> int:
    return RUN + 1 + replica


def _thread(replica: int, lane: int = -1) -> int:
    """Returns the thread number of a lane; without a lane, that of the replica's activity."""
    return _process(replica) * LANE_THREADS + lane + 1


def _chunks(record: Record) -> Iterator[dict]:
    chunks = sorted(record.chunks, key=lambda chunk: (chunk.replica, chunk.begin_s, chunk.end_s, chunk.sample_id))
    lanes = lanes_of([_whole(chunk) for chunk in chunks])
    for replica, lane in sorted({(chunk.replica, lane) for chunk, lane in zip(chunks, lanes, strict=True)}):
        yield _meta("thread_name", _process(replica), f"chunks {lane}", _thread(replica, lane))
    arrows = _arrows(record)
    for chunk, lane in zip(chunks, lanes, strict=True):
        where = _process(chunk.replica), _thread(chunk.replica, lane)
        said = _arguments(record, chunk)
        whole = _slice(chunk.sample_id, "chunk", where, chunk.begin_s, chunk.end_s, said)
        yield whole | arrows.get(id(chunk), {})
        for part in chunk.spans() if chunk.race is None else ():
            yield _slice(part.role, "part", where, part.begin_s, part.end_s, {})


def _whole(chunk: RecordedChunk) -> Span:
    return Span(
        replica=chunk.replica,
        sample_id=chunk.sample_id,
        role="chunk",
        begin_s=chunk.begin_s,
        end_s=chunk.end_s,
        tokens=chunk.new_tokens,
    )


def _arguments(record: Record, chunk: RecordedChunk) -> dict:
    known = {
        "chunk": chunk.chunk_id,
        "batch": record.samples[chunk.sample_id].batch,
        "start": chunk.start,
        "new_tokens": chunk.new_tokens,
        "context_tokens": chunk.context_tokens,
        "weights_version": chunk.weights_version,
        "end": chunk.end,
        "reason": chunk.reason,
        **{name: getattr(chunk, name) for name in COUNTS},
    }
    raced = {"race": chunk.race, "copy": chunk.is_copy, "won": chunk.won} if chunk.race else {}
    words = {"method": chunk.method, "error": chunk.error}
    return known | raced | {key: value for key, value in words.items() if value}


def _arrows(record: Record) -> dict[int, dict]:
    """Returns the arrows of each chunk by its `id`. Arrows connect the chunks of a sample in order; a race counts with
    its winner alone. A sample of one chunk has no arrow.
    """
    found = {}
    for number, sample in enumerate(record.samples.values(), start=1):
        kept = [chunk for chunk in sample.chunks if chunk.won or (chunk.won is None and not chunk.is_copy)]
        for before, after in pairwise(kept):
            found.setdefault(id(before), {"bind_id": hex(number)})["flow_out"] = True
            found.setdefault(id(after), {"bind_id": hex(number)})["flow_in"] = True
    return found


def _activity(bands: Sequence[Band]) -> Iterator[dict]:
    for replica in sorted({band.replica for band in bands}):
        yield _meta("thread_name", _process(replica), "activity", _thread(replica))
        yield _meta("thread_sort_index", _process(replica), -1, _thread(replica), "sort_index")
    for band in bands:
        where = _process(band.replica), _thread(band.replica)
        yield _slice(band.role, "activity", where, band.begin_s, band.end_s, {})


def _run(record: Record) -> Iterator[dict]:
    yield _meta("thread_name", RUN, "tail", RUN)
    for number, (begin_s, end_s) in enumerate(tails(record.run.ended)):
        yield _slice("tail", "tail", (RUN, RUN), begin_s, end_s, {"step": number})
    for at_s, version in record.weights:
        yield _instant("weights", at_s, {"version": version})
    for at_s, replicas, reason in record.asked:
        if at_s <= record.run.makespan_s:
            yield _instant("replicas wanted", at_s, {"replicas": replicas, "reason": reason})


def _counters(record: Record) -> Iterator[dict]:
    for moment in record.run.moments:
        yield _counter("samples", moment.at_s, {"running": moment.running, "waiting": moment.waiting})
        yield _counter("replicas up", moment.at_s, {"replicas": moment.replicas})
    yield from _sums(record.chunks, "end_s", "drafts, so far", ("drafted_tokens", "accepted_tokens"))
    yield from _sums(record.chunks, "begin_s", "KV of contexts, so far", ("pulled_tokens", "computed_tokens"))


def _sums(chunks: Iterable[RecordedChunk], when: str, name: str, counts: Sequence[str]) -> Iterator[dict]:
    sums: dict[str, int] = defaultdict(int)
    for chunk in sorted(chunks, key=lambda chunk: getattr(chunk, when)):
        for one in counts:
            sums[one] += getattr(chunk, one)
        yield _counter(name, getattr(chunk, when), dict(sums))


def _slice(name: str, category: str, where: tuple[int, int], begin_s: float, end_s: float, arguments: dict) -> dict:
    begin_us, end_us = _us(begin_s), _us(end_s)
    process, thread = where
    made = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread, "ts": begin_us}
    return made | {"dur": round(end_us - begin_us, 3), "args": arguments}


def _instant(name: str, at_s: float, arguments: dict) -> dict:
    return {"ph": "i", "s": "g", "name": name, "cat": "run", "pid": RUN, "tid": RUN, "ts": _us(at_s), "args": arguments}


def _counter(name: str, at_s: float, values: dict) -> dict:
    return {"ph": "C", "name": name, "pid": RUN, "ts": _us(at_s), "args": values}


def _us(seconds: float) -> float:
    """Returns microseconds, the format's unit, rounded to whole nanoseconds."""
    return round(seconds * 1e9) / 1e3
