"""Laws of a timeline as a trace for Perfetto: the format is kept, slices nest, and SQL over it finds the run again."""

import json
import re
import shutil
import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from test_sim_page import HOSTILE
from test_timeline import RECORDED, Script, live, raced  # noqa: F401 - `live` is a fixture

from tailrace.app.cli import run
from tailrace.lab.timeline.figures import figures
from tailrace.lab.timeline.perfetto import trace_events
from tailrace.lab.timeline.record import Record
from tailrace.lab.timeline.replica_states import bands

ROOT = Path(__file__).parents[2]
PROCESSOR = ROOT / ".perfetto"
"""`make test-traces` puts the trace processor there."""

NEEDED = {
    "M": {"name", "pid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "C": {"name", "pid", "ts", "args"},
}
"""Fields of the Trace Event Format, by phase."""


def updated() -> Script:
    """One sample under two weights; its second chunk pulls the first one's KV, and drafts."""
    script = Script(groups=("p0",), samples=1)
    script.chunk("b0/p0#0:0", "a", 10.0, 12.0)
    script.event(13.0, "WeightsChanged", version=4)
    counts = {
        "verifications": 10,
        "drafted_tokens": 50,
        "accepted_tokens": 20,
        "pulled_tokens": 96,
        "computed_tokens": 11,
    }
    script.action(13.0, "StartChunk", chunk_id="b0/p0#0:1", sample_id="b0/p0#0", replica_id="b", start=100,
                  weights_version=4, reason="r")  # fmt: skip
    script.event(15.0, "ChunkFinished", chunk_id="b0/p0#0:1", new_tokens=30, end="stop", **counts)
    script.end(15.0, "b0/p0#0")
    return script


def events_of(record: Record) -> list[dict]:
    made = trace_events("run", record, bands(record))
    assert set(made) == {"traceEvents", "displayTimeUnit", "otherData"}
    return json.loads(json.dumps(made, allow_nan=False))["traceEvents"]


def record_of(name: str, request) -> Record:
    return request.getfixturevalue("live") if name == "live" else {"raced": raced, "updated": updated}[name]().record()


RUNS = pytest.mark.parametrize("name", ["live", "raced", "updated"])


@RUNS
def test_every_event_has_the_fields_of_its_phase_and_slices_of_a_thread_nest(name, request):
    threads = defaultdict(list)
    for event in events_of(record_of(name, request)):
        assert set(event) >= NEEDED[event["ph"]], event
        assert event.get("ts", 0) >= 0 and event["ph"] in NEEDED
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], -event["dur"], event["ts"] + event["dur"]))
    for slices in threads.values():
        open_until = []
        for begin, _, end in sorted(slices):
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)


@RUNS
def test_every_chunk_is_a_slice_and_leads_to_the_one_that_continues_it(name, request):
    record = record_of(name, request)
    events = events_of(record)
    chunks = [event["args"] for event in events if event.get("cat") == "chunk" and event["ph"] == "X"]
    assert sorted(one["chunk"] for one in chunks) == sorted(chunk.chunk_id for chunk in record.chunks)
    chains = defaultdict(list)
    for event in sorted((e for e in events if "bind_id" in e), key=lambda e: (e["ts"], e["args"]["start"])):
        chains[event["bind_id"]].append(event)
    for chain in chains.values():
        assert len({event["name"] for event in chain}) == 1 < len(chain)
        assert [e.get("flow_in") for e in chain] == [None, *[True] * (len(chain) - 1)]
        assert [e.get("flow_out") for e in chain] == [*[True] * (len(chain) - 1), None]
        for before, after in pairwise(chain):
            assert before["args"]["start"] + before["args"]["new_tokens"] == after["args"]["start"]
    continued = [c for s in record.samples.values() for c in s.chunks[1:] if c.won is not False]
    assert sum(bool(event.get("flow_in")) for event in events) == len(continued)


def test_counters_end_at_the_sums_of_the_run():
    record = updated().record()
    last = {event["name"]: event["args"] for event in events_of(record) if event["ph"] == "C"}
    assert last["drafts, so far"] == {"drafted_tokens": 50, "accepted_tokens": 20}
    assert last["KV of contexts, so far"] == {"pulled_tokens": 96, "computed_tokens": 11}
    weights = [(e["ts"], e["args"]["version"]) for e in events_of(record) if e["name"] == "weights"]
    assert weights == [(0, 0), (3e6, 4)]
    said = figures(record, bands(record))
    assert (said["accepted_share"], said["acceptance_length"], said["pulled_tokens"]) == (0.4, 3.0, 96)
    assert said["weights"] == [{"at_s": 0.0, "version": 0}, {"at_s": 3.0, "version": 4}]
    assert said["replicas"]["b"]["computed_tokens"] == 11 and said["replicas"]["a"]["acceptance_length"] is None


def test_the_command_writes_it(tmp_path):
    assert run(["timeline", str(RECORDED), "--out", str(tmp_path / "x.perfetto.json")]) == 0
    assert json.loads((tmp_path / "x.perfetto.json").read_text())["otherData"]["run"] == RECORDED.name
    assert run(["timeline", str(RECORDED), "--out", str(tmp_path / "x.json")]) == 2


# ---- in Perfetto's own trace processor ---------------------------------------------------------------------------


def ask(tmp_path: Path, record: Record, *queries: str) -> list[list[dict]]:
    """The rows of each query over the record's trace, by the trace processor; the first query is for its complaints."""
    for needed in ("node", PROCESSOR / "trace_processor.wasm"):
        if not (shutil.which(needed) if isinstance(needed, str) else needed.exists()):
            pytest.skip(f"{needed} is not there: `make test-traces` runs this test, on a machine with Node.js")
    trace = tmp_path / "x.perfetto.json"
    trace.write_text(json.dumps(trace_events("run", record, bands(record))))
    complaints = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"
    command = ["node", str(ROOT / "integrations" / "perfetto" / "query.mjs"), str(PROCESSOR), str(trace)]
    asked = json.dumps([complaints, *queries])
    answer = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    said, *rows = json.loads(answer.stdout)
    assert said == []
    return rows


@pytest.mark.traces
@RUNS
def test_sql_finds_the_run_again(name, request, tmp_path):
    record = record_of(name, request)
    said = figures(record, bands(record))
    argument = "sum(extract_arg(slice.arg_set_id, 'args.{}'))".format
    of = "extract_arg({}.arg_set_id, 'args.{}')".format
    replicas, arrows, counters, tail, deep = ask(
        tmp_path,
        record,
        f"""select process.name as replica, count(*) as chunks, {argument("new_tokens")} as tokens,
            {argument("drafted_tokens")} as drafted, {argument("pulled_tokens")} as pulled
            from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
            join process using (upid) where category = 'chunk' group by 1""",
        f"""select count(*) as arrows, sum({of("b", "start")} + {of("b", "new_tokens")} = {of("a", "start")}) as joins
            from flow join slice b on slice_out = b.id join slice a on slice_in = a.id where a.name = b.name""",
        """select counter_track.name as name, max(value) as most from counter
            join counter_track on counter.track_id = counter_track.id group by 1""",
        "select ts, dur from slice where category = 'tail' order by ts",
        "select max(depth) as deep from slice where category in ('chunk', 'part', 'activity')",
    )
    told = {f"replica {name}": one for name, one in said["replicas"].items() if one["tokens"] or one["up_s"]}
    for row in replicas:
        one = told[row["replica"]]
        assert (row["tokens"], row["drafted"]) == (one["tokens"], one["drafted_tokens"])
        assert row["pulled"] == one["pulled_tokens"]
    assert sum(row["chunks"] for row in replicas) == said["chunks"] == len(record.chunks)
    continued = [e for e in events_of(record) if e.get("flow_in")]
    assert (arrows[0]["arrows"], arrows[0]["joins"] or 0) == (len(continued), len(continued))
    most = {row["name"]: row["most"] for row in counters}
    assert most["drafts, so far drafted_tokens"] == said["drafted_tokens"]
    assert most["samples running"] == max(moment.running for moment in record.run.moments)
    assert sum(row["dur"] for row in tail) / 1e9 == pytest.approx(said["tail_s"], abs=1e-3)
    assert deep[0]["deep"] <= 1


@pytest.mark.traces
def test_names_are_data(tmp_path):
    script = Script(groups=(HOSTILE,), samples=1)
    script.chunk(f"b0/{HOSTILE}#0:0", "a", 10.0, 12.0)
    script.end(12.0, f"b0/{HOSTILE}#0")
    (rows,) = ask(tmp_path, script.record(), "select name from slice where category = 'chunk'")
    assert rows == [{"name": f"{HOSTILE}#0"}]


@pytest.mark.traces
def test_the_queries_of_the_page_give_its_tables(live, tmp_path):  # noqa: F811
    page = (ROOT / "docs" / "traces.md").read_text()
    pairs = re.findall(r"```sql\n([^`]+)```\n\n((?:\|[^\n]*\n)+)", page)
    assert len(pairs) >= 3
    for rows, (_, table) in zip(ask(tmp_path, live, *(sql for sql, _ in pairs)), pairs, strict=True):
        heads, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        said = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()] for row in rows]
        assert (list(rows[0]), said) == (heads, lines)
