"""Laws of a recorded run's timeline: nothing of the journal is lost or told twice; whoever is first in a race has won;
roles fill the time a replica is up, and the page shows it, whatever ids and however many."""

import gzip
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from test_sim_page import HOSTILE, Reader, data_of

from tailrace.app.cli import run
from tailrace.app.errors import BadInput
from tailrace.app.files.figures import new_figure
from tailrace.lab.report.span_lanes import lanes_of, sources_of
from tailrace.lab.simulator.types import Span
from tailrace.lab.timeline.figures import figures, longest
from tailrace.lab.timeline.page import page
from tailrace.lab.timeline.record import Record, record
from tailrace.lab.timeline.replica_states import bands

RECORDED = Path(__file__).parents[1] / "data" / "journal.jsonl.gz"
"""Of the demo's prompts on two replicas of the demo model, 6 samples each, with new weights after 35 of 101 seconds."""


class Script:
    """Lines of a journal, written in any order of time. Replicas a, b, c join before the batch `b0`."""

    def __init__(self, groups=("p0", "p1"), samples=2):
        self._entries = []
        for replica in "abc":
            self.event(1.0, "ReplicaJoined", replica_id=replica)
        self.submit(10.0, "b0", groups, samples)

    def event(self, now, kind, **fields):
        self._entries.append((now, 0, {kind: {"now": now, **fields}}))

    def action(self, now, kind, **fields):
        self._entries.append((now, 1, {"Tick": {"now": now}, "actions": [{kind: fields}]}))

    def submit(self, now, batch, groups, samples=2):
        groups = [{"group_id": f"{batch}/{g}", "prompt_tokens": 7, "samples": samples} for g in groups]
        self.event(now, "SamplesSubmitted", batch_id=batch, groups=groups)

    def chunk(self, chunk, replica, begin, end, tokens=100, how="length", start=0, **race):
        sample = chunk.rpartition(":")[0]
        self.action(begin, "StartChunk", chunk_id=chunk, sample_id=sample, replica_id=replica, start=start,
                    reason=f"because of {replica}", **race)  # fmt: skip
        if end is not None:
            self.event(end, "ChunkFinished", chunk_id=chunk, new_tokens=tokens, end=how)

    def end(self, now, sample, how="stop"):
        self.action(now, "EndSample", sample_id=sample, end=how)

    def lines(self, **more):
        header = {"journal": 1, "policies": {"of": "a later core"}, "dropped": 3, "limits": [0, 3], **more}
        ordered = sorted(self._entries, key=lambda entry: entry[:2])
        return [json.dumps(line) for line in (header, *(line for _, _, line in ordered))]

    def record(self, **more) -> Record:
        return record(self.lines(**more))


def raced() -> Script:
    """b0/p0#0 runs on a, then is raced: by c with `suffix`, first, and by b. Replica c is given back later on."""
    script = Script()
    for number, sample in enumerate(("b0/p0#1", "b0/p1#0", "b0/p1#1")):
        script.chunk(f"{sample}:0", "abc"[number], 10.0, 12.0 + number)
        script.end(12.0 + number, sample)
    script.chunk("b0/p0#0:0", "a", 10.0, 20.0)
    script.chunk("b0/p0#0:1", "a", 20.0, 30.2, 0, "aborted", start=100)
    script.chunk("b0/p0#0:2", "c", 22.0, 30.0, 50, "length", 100, copy_of="b0/p0#0:1", method="suffix")
    script.chunk("b0/p0#0:3", "b", 23.0, 30.1, 0, "aborted", 100, copy_of="b0/p0#0:1", method="history")
    script.chunk("b0/p0#0:4", "c", 30.3, 33.0, 40, "stop", start=150)
    script.end(33.0, "b0/p0#0")
    return script


@pytest.fixture(scope="module")
def live() -> Record:
    return record(gzip.decompress(RECORDED.read_bytes()).decode().splitlines())


def test_nothing_of_a_live_run_is_lost_or_told_twice(live):
    told = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).decode().splitlines()]
    finished = [line["ChunkFinished"] for line in told if "ChunkFinished" in line]
    said = figures(live, bands(live))
    assert said["tokens"] == sum(one["new_tokens"] for one in finished) and said["chunks"] == len(finished)
    assert sum(span.tokens for span in live.run.spans if span.role == "generate") == said["tokens"]
    starts = [a["StartChunk"] for line in told for a in line.get("actions", ()) if "StartChunk" in a]
    assert said["moves"] == sum("moves from" in start["reason"] for start in starts) > 0
    assert said["unended"] == 0 == len(said["races"]) and said["samples"] == 96
    assert all(0 <= span.begin_s <= span.end_s <= said["makespan_s"] + 1e-3 for span in live.run.spans)
    assert {span.role for span in live.run.spans} == {"generate", "prefill"}
    moments = live.run.moments
    assert all(moment.waiting >= 0 and moment.running >= 0 for moment in moments) and moments[-1].running == 0
    assert max(moment.running for moment in moments) == 32 and moments[0][1:3] == (0, 96)


def test_the_live_run_has_all_that_a_timeline_shows(live):
    """Else the recorded run would not show the problem: a tail; and drafts, KV from the pool, new weights."""
    said = figures(live, bands(live))
    assert said["tail_share"] > 0.05 and 0 < said["accepted_share"] < 1 < said["acceptance_length"]
    assert 0 < said["pulled_tokens"] < said["computed_tokens"]
    assert [one["version"] for one in said["weights"]] == [0, 1] and 0 < said["weights"][1]["at_s"] < said["makespan_s"]
    words = " ".join(Reader(page("run", live, bands(live), said)).texts)
    for heading in ("Acceptance length", "Drafts", "KV of contexts", "weights 1"):
        assert heading in words


def test_a_sample_that_continues_at_the_next_tick_has_not_waited():
    script = Script(groups=("p0",), samples=1)
    script.chunk("b0/p0#0:0", "a", 10.0, 12.0)
    script.chunk("b0/p0#0:1", "a", 12.01, 14.0, how="stop", start=100)
    script.end(14.01, "b0/p0#0")
    moments = script.record().run.moments
    assert [(m.running, m.waiting) for m in moments if m.at_s > 0] == [(0, 0)]
    assert moments[-2][:3] == (0.0, 1, 0)


def in_turns() -> Script:
    """b0/p0#0 has a turn from 10 to 12 s, is held until 16 s, waits for a replica until 17 s, and has another turn."""
    script = Script(groups=("p0",), samples=1)
    script.chunk("b0/p0#0:0", "a", 10.0, 12.0, how="stop")
    script.action(12.0, "EndTurn", sample_id="b0/p0#0", end="stop", reason="stop token")
    script.event(16.0, "SampleReturned", sample_id="b0/p0#0", outside_tokens=5, max_tokens=100)
    script.chunk("b0/p0#0:1", "a", 17.0, 19.0, how="stop", start=100)
    script.action(19.0, "EndTurn", sample_id="b0/p0#0", end="stop", reason="stop token")
    script.end(20.0, "b0/p0#0")
    return script


def test_a_sample_between_two_turns_does_not_wait():
    taken = in_turns().record()
    assert [tuple(m[:3]) for m in taken.run.moments] == [
        *((0.0, 1, 0), (2.0, 0, 0), (6.0, 0, 1), (7.0, 1, 0), (9.0, 0, 0)),
    ]
    assert longest(taken)[1][5] == "1", "from its return to its second chunk"
    script = in_turns()
    script.chunk("b0/p0#0:0~x", "b", 11.0, 17.5, 0, "aborted", copy_of="b0/p0#0:0", method="x")
    assert script.record().run.moments == taken.run.moments, "a copy that stops late changes nothing"


@pytest.mark.parametrize("made", ["live", "raced"])
def test_roles_fill_the_time_a_replica_is_up(live, made):
    taken = live if made == "live" else raced().record()
    found = bands(taken)
    for replica, lifetimes in enumerate(taken.lifetimes):
        own = [band for band in found if band.replica == replica]
        assert own[0].begin_s == lifetimes[0].begin_s and own[-1].end_s == lifetimes[-1].end_s
        assert all(a.end_s == b.begin_s and a.role != b.role for a, b in pairwise(own))
    said = figures(taken, found)
    assert sum(said["role_s"].values()) == pytest.approx(said["replica_s"], abs=0.02)
    for one in said["replicas"].values():
        assert one["up_s"] * (1 - one["busy_share"]) == pytest.approx(one["idle"], abs=0.01)


def test_the_first_of_a_race_to_end_has_won_and_the_sample_goes_on_where_it_did():
    taken = raced().record()
    said = figures(taken, bands(taken))
    (race,) = said["races"]
    assert race["winner"] == {"replica": "c", "method": "suffix"} and said["wins"] == {"suffix": 1}
    assert [one["method"] for one in race["runners"]] == ["owner", "suffix", "history"]
    assert (race["sample"], race["began_s"], race["ended_s"]) == ("p0#0", 12.0, 20.0)
    assert said["moves"] == 0, "it went on where its copy had run"
    assert taken.samples["p0#0"].tokens == 190, "copies make the same tokens"
    roles = [(span.replica, span.role) for span in taken.run.spans if span.sample_id == "p0#0"]
    assert roles == [(0, "generate"), (0, "lost"), (2, "won"), (1, "lost"), (2, "generate")]
    copying = [band for band in bands(taken) if band.role == "race"]
    assert {(band.replica, round(band.end_s - band.begin_s, 3)) for band in copying} == {(2, 8.0), (1, 7.1)}
    assert "+c (suffix, won)" in longest(taken)[1][8]


def test_an_undecided_race_has_no_winner_and_a_copy_may_take_over_from_a_lost_replica():
    script = Script(groups=("p0",), samples=1)
    script.chunk("b0/p0#0:0", "a", 10.0, None)
    script.chunk("b0/p0#0:1", "b", 11.0, 15.0, copy_of="b0/p0#0:0")
    script.chunk("b0/p0#0:2", "c", 11.0, None, copy_of="b0/p0#0:0")
    taken = record(line for line in script.lines() if "ChunkFinished" not in line)
    assert taken.races[0].winner is None and {span.role for span in taken.run.spans} == {"race"}
    assert [chunk.end for chunk in taken.chunks] == ["running"] * 3
    script.event(14.0, "ReplicaLeft", replica_id="a", error="killed")
    taken = script.record()
    assert taken.chunks[0].end == "lost" and taken.chunks[0].won is False and taken.races[0].winner.replica == 1
    assert "lost: killed" in taken.chunks[0].spans()[0].note
    assert figures(taken, bands(taken))["unended"] == 1


@pytest.mark.parametrize("lost", [False, True])
def test_a_sample_waits_though_a_beaten_chunk_is_still_to_stop(lost):
    script = Script(groups=("p0",), samples=1)
    script.chunk("b0/p0#0:0", "a", 10.0, None if lost else 16.0, 0, "aborted")
    script.chunk("b0/p0#0:0~x", "c", 11.0, 16.0 if lost else 13.0, 50, "aborted" if lost else "length",
                 copy_of="b0/p0#0:0", method="x")  # fmt: skip
    if lost:
        script.action(12.0, "AbortChunk", chunk_id="b0/p0#0:0~x", replica_id="c", reason="samples wait for room")
        script.event(13.0, "ReplicaLeft", replica_id="a", error="killed")
    script.action(13.5, "Prefetch", sample_id="b0/p0#0", replica_id="b", reason="next")
    script.chunk("b0/p0#0:1", "b", 15.0, 20.0, 50, "stop", start=0 if lost else 50)
    script.end(20.0, "b0/p0#0")
    moments = script.record().run.moments
    running = [(moment.at_s, moment.running, moment.waiting) for moment in moments if moment.at_s > 1]
    assert running == [(3.0 if lost else 3.5, 0, 1), (5.0, 1, 0), (10.0, 0, 0)]


def test_a_copy_that_is_told_to_stop_gives_way_and_an_original_that_is_takes_its_race_with_it():
    script = Script(groups=("p0",), samples=1)
    original, copy = "b0/p0#0:0", "b0/p0#0:0~suffix"
    script.chunk(original, "a", 10.0, 20.0, 60, "aborted")
    script.chunk(copy, "b", 11.0, 13.0, 10, "aborted", copy_of=original, method="suffix")
    script.action(12.5, "AbortChunk", chunk_id=copy, replica_id="b", reason="samples wait for room")
    script.chunk(copy, "c", 14.0, 20.1, 50, "aborted", copy_of=original, method="suffix")
    script.action(19.9, "AbortChunk", chunk_id=original, replica_id="a", reason="a is to be given back")
    script.chunk("b0/p0#0:1", "b", 21.0, 30.0, 20, "stop", start=60)
    script.end(30.0, "b0/p0#0")
    taken = script.record()
    (race,) = taken.races
    assert [taken.names[one.replica] for one in race.runners] == ["a", "b", "c"] and race.winner is race.runners[0]
    assert len(taken.chunks) == 4 and taken.samples["p0#0"].tokens == 80
    assert taken.samples["p0#0"].moves == 1, "from a to b, where a copy had run in vain"
    assert "a is to be given back" in race.runners[0].spans()[0].note


def test_a_copy_that_took_the_place_of_a_lost_original_is_one_itself():
    script = Script(groups=("p0",), samples=1)
    original = "b0/p0#0:0"
    script.chunk(original, "a", 10.0, None)
    script.chunk(f"{original}~x", "b", 11.0, 15.0, 50, "aborted", copy_of=original, method="x")
    script.event(12.0, "ReplicaLeft", replica_id="a", error="killed")
    script.chunk(f"{original}~y", "c", 13.0, 15.1, 20, "aborted", copy_of=f"{original}~x", method="y")
    (race,) = script.record().races
    assert race.winner.method == "x" and len(race.runners) == 3


def test_at_exactness_law_no_copy_wins_or_replaces_a_lost_chunk_and_its_tokens_do_not_count():
    script = Script(groups=("p0",), samples=2)
    for sample in ("b0/p0#0", "b0/p0#1"):
        script.chunk(f"{sample}:0", "a", 10.0, 20.0 if sample.endswith("0") else None, 60, "stop")
        script.chunk(f"{sample}:0~x", "b", 11.0, 14.0, 90, "stop", copy_of=f"{sample}:0", method="x")
        script.chunk(f"{sample}:0~y", "c", 11.0, 20.1, 80, "aborted", copy_of=f"{sample}:0", method="y")
    script.end(20.0, "b0/p0#0")
    script.event(20.05, "ReplicaLeft", replica_id="a", error="killed")
    script.chunk("b0/p0#1:1", "c", 21.0, 30.0, 70, "stop")
    script.end(30.0, "b0/p0#1")
    taken = script.record(exactness="law")
    said = figures(taken, bands(taken))
    assert said["wins"] == {"owner": 1} and [race["winner"] is None for race in said["races"]] == [False, True]
    assert [taken.samples[name].tokens for name in ("p0#0", "p0#1")] == [60, 70] and said["tokens"] == 130
    assert said["moves"] == 1, "of the second, from a to c; no copy has moved one"
    assert {chunk.won for chunk in taken.chunks if chunk.is_copy} == {False}
    assert figures(script.record(), [])["wins"] == {"x": 2}


def test_a_replica_that_is_given_back_closes_before_it_goes():
    script = raced()
    script.event(10.5, "ReplicaJoined", replica_id="d")
    script.action(14.5, "SetReplicas", replicas=3, reason="few left")
    script.event(16.0, "ReplicaLeft", replica_id="d", error="stopped")
    script.action(31.0, "SetReplicas", replicas=2, reason="few left")
    taken = script.record()
    closing = [(taken.names[band.replica], *band[2:]) for band in bands(taken) if band.role == "closing"]
    assert ("d", 4.5, 6.0) in closing
    assert [one for one in closing if one[0] != "d"] == [("b", 21.0, 23.0)], "the newest that runs nothing"
    assert [(round(at_s, 1), count) for at_s, count, _ in taken.asked] == [(4.5, 3), (21.0, 2)]
    assert taken.run.moments[-1].replicas == 3


def test_what_no_timeline_shows_is_passed_over_and_what_does_not_fit_is_named():
    script = raced()
    plain = figures(script.record(), bands(script.record()))
    script.event(11.0, "DrafterJoined", drafter_id="x")
    script.action(11.0, "Meditate", reason="why not")
    assert figures(script.record(), bands(script.record())) == plain
    assert plain["dropped_entries"] == 3
    script.chunk("b0/p9#0:0", "a", 40.0, 41.0)
    with pytest.raises(ValueError, match=r"line \d+: StartChunk: .*b0/p9#0"):
        script.record()
    for lines, said in (([], "line 1"), (["{}"], "line 1"), (script.lines()[:3], "no samples"), (["[]"], "line 1")):
        with pytest.raises(ValueError, match=said):
            record(lines)


def test_each_batch_has_its_own_tail():
    script = raced()
    script.submit(50.0, "b1", ("p0",), 1)
    script.chunk("b1/p0#0:0", "b", 50.0, 60.0)
    script.end(60.0, "b1/p0#0")
    taken = script.record()
    assert set(taken.samples) >= {"b0/p0#0", "b1/p0#0"} and taken.run.makespan_s == 50.0
    assert data_of(page_of(taken))["runs"][0]["tails"] == [[23.0, 23.0], [50.0, 50.0]]


# ---- what is drawn --------------------------------------------------------------------------------------


def page_of(taken: Record, title="a run") -> str:
    found = bands(taken)
    return page(title, taken, found, figures(taken, found))


def test_the_page_is_well_formed_and_shows_every_replica_sample_and_race(live):
    for taken in (live, raced().record()):
        text = page_of(taken)
        data, said = data_of(text), " ".join(Reader(text).texts)
        assert data["runs"][0]["replicas"] == list(taken.names) and data["runs"][0]["offsets"][-1] == len(
            taken.run.spans
        )
        assert set(data["samples"]) == set(taken.samples) and all(row[0] in said for row in longest(taken))
        assert data["colour"] == "sample" and data["last"]
        assert text == page_of(taken)
        assert not [
            way for way in ("http:", "https:", "src=", "href=", "url(", "fetch(", "<link") if way in text.lower()
        ]
    assert "suffix on c" in said


def test_hostile_ids_and_reasons_are_inert():
    script = Script(groups=(HOSTILE,), samples=1)
    sample = f"b0/{HOSTILE}#0"
    script.event(2.0, "ReplicaJoined", replica_id=HOSTILE)
    script.chunk(f"{sample}:0", HOSTILE, 10.0, 20.0)
    script.chunk(f"{sample}:1", "a", 11.0, 21.0, copy_of=f"{sample}:0", method=HOSTILE)
    script.end(22.0, sample, HOSTILE)
    text = page_of(script.record(), HOSTILE)
    read = Reader(text)
    assert read.tags.count("script") == 2 and not {"img"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on") or name == "src"]
    assert HOSTILE + "#0" in data_of(text)["samples"]


def test_no_two_spans_overlap_in_a_lane_and_a_sample_keeps_its_own(live):
    spans = sorted(live.run.spans, key=lambda span: (span.replica, span.begin_s, span.end_s))
    lanes = lanes_of(spans)
    places = sorted(zip(spans, lanes, strict=True), key=lambda pair: (pair[0].replica, pair[1], pair[0].begin_s))
    for (a, lane), (b, other) in pairwise(places):
        assert (a.replica, lane) != (b.replica, other) or a.end_s <= b.begin_s
    assert max(lanes) == 15
    kept = [Span(0, "x", "generate", 0, 2, 1), Span(0, "y", "generate", 0, 1, 1), Span(0, "y", "generate", 2, 3, 1)]
    assert lanes_of(kept) == [0, 1, 1]


def test_lines_go_from_where_a_sample_was_to_where_it_went_on():
    spans = list(raced().record().run.spans)
    pairs = [(spans[source], span) for span, source in zip(spans, sources_of(spans), strict=True) if source is not None]
    drawn = {(a.replica, a.begin_s, b.replica, b.begin_s) for a, b in pairs}
    assert drawn == {(0, 10.0, 2, 12.0), (0, 10.0, 1, 13.0)}, "to both copies, from the chunk that they copy"


def test_the_command_draws_and_says_what_is_wrong(tmp_path, capsys):
    journal = tmp_path / "run.jsonl"
    journal.write_text("\n".join(raced().lines()) + "\n")
    for name, head in (("x.html", b"<!DOCTYPE html>"), ("x.perfetto.json", b"{")):
        assert run(["timeline", str(journal), "--out", str(tmp_path / name), "--json"]) == 0
        assert (tmp_path / name).read_bytes().startswith(head)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["makespan_s"] == 23.0 and said["wins"] == {"suffix": 1} and set(said["replicas"]) == set("abc")
    assert run(["timeline", str(RECORDED)]) == 0
    (tmp_path / "bad.jsonl").write_text('{"journal": 1, "dropped": 0}\nnonsense\n')
    (tmp_path / "bad.gz").write_bytes(b"no gzip")
    for arguments, what in (
        ([tmp_path / "none.jsonl"], "cannot be read"),
        ([tmp_path / "bad.jsonl"], "line 2: not a line of a journal"),
        ([tmp_path / "bad.gz"], "cannot be read"),
        ([journal, "--out", "x.png"], ".html or .perfetto.json"),
        ([journal, "--out", tmp_path / "no" / "x.html"], "its folder does not exist"),
    ):
        capsys.readouterr()
        assert run(["timeline", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert what in error and error.count("\n") == 1


def test_a_picture_without_matplotlib_says_which_extra_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadInput, match=r"pip install 'tailrace\[bench\]'"):
        new_figure(4, 3)
