"""A recorded run as the board plays it back: frames of the rows that a live service would have shown, and each sample.

A journal has a chunk's tokens at the end of the chunk, so they are spread evenly over the time since its first token.
The KV pool, texts and weights are left out. `tailrace board --journal` calls this module.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from heapq import nlargest
from typing import Any

from tailrace.app.board.news import news
from tailrace.app.board.recording import Recording
from tailrace.deployments.feed.deltas import Sections, change, fold
from tailrace.lab.timeline.chunks import RecordedChunk, RecordedSample
from tailrace.lab.timeline.record import Record

FRAMES = 400
SHORTEST_S = 0.1
LONGEST = 64
MAX_UNENDED = 5_000
"""Maximum number of samples in flight that are shown one by one; with more, waiting ones are only counted."""

TAIL_SHARE = 0.9


def recording(name: str, record: Record) -> Recording:
    """Returns the recording. `name`: the journal's name."""
    frames, state, lines = [], {}, 0
    for at_s in _times(record.run.makespan_s):
        now = _Moment(record, at_s).sections()
        changes = {section: change(state.get(section, {}), rows) for section, rows in now.items()}
        found = news(state, changes) if state else []
        changes["moments"] = {f"{at_s:.2f}": _moment_of(now)}
        changes["news"] = {str(lines + place): {"at_s": at_s, "text": text} for place, text in enumerate(found)}
        lines += len(found)
        fold(state, {section: rows for section, rows in changes.items() if section != "moments"})
        frames.append((round(at_s, 2), {section: rows for section, rows in changes.items() if rows}))
    samples = {sample_id: _log(record, sample_id, sample) for sample_id, sample in record.samples.items()}
    return Recording(name, tuple(frames), samples)


def _times(whole_s: float) -> Iterator[float]:
    frames = max(1, min(FRAMES, int(whole_s / SHORTEST_S)))
    return (whole_s * frame / frames for frame in range(frames + 1))


class _Moment:
    """State of a run at `at_s` seconds."""

    def __init__(self, record: Record, at_s: float):
        self._record, self._at_s = record, at_s
        self._begun = [chunk for chunk in record.chunks if chunk.begin_s <= at_s]
        self._active = [chunk for chunk in self._begun if chunk.end_s > at_s or chunk.end == "running"]
        self._going = [chunk for chunk in self._active if chunk.beaten_s > at_s]  # the others are still to stop
        self._here = {
            name: sample for name, sample in record.samples.items()
            if sample.submitted_s <= at_s
        }  # fmt: skip
        self._unended = {
            name: sample for name, sample in self._here.items() if sample.ended_s is None or sample.ended_s > at_s
        }
        self._held = {name for name, sample in self._unended.items() if sample.is_held(at_s)}

    def sections(self) -> Sections:
        here = self._unended.keys() - self._held
        running = here & {chunk.sample_id for chunk in self._going}
        waiting = len(here - running)
        replicas = self._replicas()
        service = {"running": len(running), "waiting": waiting, "held": len(self._held), "up": len(replicas)}
        service["made"] = sum(row["made"] for row in replicas.values())
        for at_s, wanted, why in self._record.asked:
            if at_s <= self._at_s:
                service |= {"wanted": wanted, "wanted_why": why}
        return {
            "service": service,
            "replicas": replicas,
            "batches": self._batches(),
            "samples": self._samples(),
            "waiting": {"its next chunk": waiting} if waiting else {},
            "faults": self._faults(),
        }

    def _replicas(self) -> dict[str, dict]:
        record, at_s = self._record, self._at_s
        active, made, rates = defaultdict(list), Counter(), Counter()
        for chunk in self._active:
            active[chunk.replica].append(chunk)
            rates[chunk.replica] += _rate(chunk)
        for chunk in self._begun:
            made[chunk.replica] += _made(chunk, at_s)
        rows = {}
        for number, name in enumerate(record.names):
            here = next((one for one in record.lifetimes[number] if one.begin_s <= at_s <= one.end_s), None)
            if here is None:
                continue
            closing = here.closing_s is not None and here.closing_s <= at_s
            rows[name] = {
                "state": "closing" if closing else "ready",
                "aside": "",
                "running": len(active[number]),
                "copies": sum(chunk.is_copy for chunk in active[number]),
                "made": round(made[number]),
                "rate": round(rates[number], 1),
                "weights": "",
            }
        return rows

    def _batches(self) -> dict[str, dict]:
        rows: dict[str, dict] = {}
        left = Counter(name.rpartition("#")[0] for name in self._unended)
        groups = {(sample.batch, name.rpartition("#")[0]) for name, sample in self._here.items()}
        for number, name in enumerate(self._record.batches):
            mine = [one for one in self._here.values() if one.batch == number]
            if not mine:
                continue
            ended = sum(one.ended_s is not None and one.ended_s <= self._at_s for one in mine)
            of_batch = [group for batch, group in groups if batch == number]
            rows[name] = {
                "name": name.rpartition("~")[0] or name,
                "samples": len(mine),
                "ended": ended,
                "groups": len(of_batch),
                "emitted": sum(not left[group] for group in of_batch),
                "tokens": round(sum(_tokens(one, self._at_s) for one in mine)),
                "tail": ended >= TAIL_SHARE * len(mine),
                "began_s": round(min(one.submitted_s for one in mine), 2),
            }
        return {name: row for name, row in rows.items() if row["ended"] < row["samples"]}

    def _samples(self) -> dict[str, dict]:
        active = {chunk.sample_id: chunk for chunk in reversed(self._going) if not chunk.is_copy}
        names = active if len(self._unended) > MAX_UNENDED else self._unended
        tokens = {name: _tokens(self._record.samples[name], self._at_s) for name in names if name in self._unended}
        return {
            name: self._sample(name, tokens[name], active.get(name))
            for name in nlargest(LONGEST, tokens, key=tokens.get)
        }

    def _sample(self, name: str, tokens: float, active: RecordedChunk | None) -> dict[str, Any]:
        sample = self._record.samples[name]
        begun = [chunk for chunk in sample.chunks if chunk.begin_s <= self._at_s]
        state, why = ("held", "between two turns") if name in self._held else ("waiting", "waits for its next chunk")
        return {
            "state": state if active is None else "running",
            "replica": self._record.names[begun[-1].replica] if begun else "",
            "tokens": round(tokens),
            "expected": begun[-1].expected_tokens if begun else sample.max_tokens,
            "max": sample.max_tokens,
            "chunks": sum(not chunk.is_copy for chunk in begun),
            "why": why if active is None else active.reason,
        }

    def _faults(self) -> dict[str, dict]:
        failed = [chunk for chunk in self._begun if chunk.end in ("failed", "lost") and chunk.end_s <= self._at_s]
        ordered = sorted(failed, key=lambda chunk: (chunk.end_s, chunk.chunk_id))
        return {
            str(number): {"at_s": round(chunk.end_s, 2), "sample": chunk.sample_id, "text": chunk.error or chunk.end,
                          "replica": self._record.names[chunk.replica]}
            for number, chunk in enumerate(ordered)
        }  # fmt: skip


def _moment_of(now: Sections) -> dict[str, Any]:
    return {
        "running": now["service"]["running"],
        "waiting": now["service"]["waiting"],
        "replicas": sum(row["state"] == "ready" for row in now["replicas"].values()),
        "tokens_per_s": round(sum(row["rate"] for row in now["replicas"].values()), 1),
        "tail": any(row["tail"] for row in now["batches"].values()),
    }


def _rate(chunk: RecordedChunk) -> float:
    seconds = chunk.end_s - chunk.silent_s
    return chunk.new_tokens / seconds if seconds > 0 else 0.0


def _made(chunk: RecordedChunk, at_s: float) -> float:
    """Returns the tokens of a chunk up to a moment."""
    if at_s >= chunk.end_s:
        return chunk.new_tokens
    return max(0.0, at_s - chunk.silent_s) * _rate(chunk)


def _tokens(sample: RecordedSample, at_s: float) -> float:
    """Returns the answer tokens up to a moment; copies that have lost do not count."""
    begun = (chunk for chunk in sample.chunks if chunk.begin_s <= at_s and chunk.counts)
    return max((chunk.start + _made(chunk, at_s) for chunk in begun), default=0.0)


def _log(record: Record, sample_id: str, sample: RecordedSample) -> dict[str, Any]:
    return {
        "sample_id": sample_id,
        "state": "ended" if sample.ended_s is not None else "waiting",
        "end": sample.end,
        "why": f"after {sample.ended_s:.1f} s of the run"
        if sample.ended_s is not None
        else "the journal ends before it",
        "error": "",
        "tokens": sample.tokens,
        "expected_tokens": None,
        "max_tokens": sample.max_tokens,
        "moves": sample.moves,
        "dropped": 0,
        "chunks": [_chunk(record, chunk) for chunk in _in_order(sample.chunks)],
        "text": None,
    }


def _in_order(chunks: Iterable[RecordedChunk]) -> list[RecordedChunk]:
    return sorted(chunks, key=lambda chunk: (chunk.begin_s, chunk.start))


def _chunk(record: Record, chunk: RecordedChunk) -> dict[str, Any]:
    runs = chunk.end == "running"
    return {
        "chunk_id": chunk.chunk_id,
        "replica_id": record.names[chunk.replica],
        "began_s": round(chunk.begin_s, 2),
        "ended_s": None if runs else round(chunk.end_s, 2),
        "start": chunk.start,
        "new_tokens": chunk.new_tokens,
        "reason": chunk.reason,
        "end": "" if runs else chunk.end,
        "asked": chunk.error if chunk.end == "aborted" else "",
        "error": chunk.error if chunk.end in ("failed", "lost") else "",
        "copy_of": chunk.race if chunk.is_copy else None,
        "method": chunk.method,
    }
