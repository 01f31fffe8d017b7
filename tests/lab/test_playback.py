"""A recorded run on the board: frames fold to the state of each moment, and hold each sample's chunks."""

import gzip
import json
from pathlib import Path

import httpx
import pytest
from test_timeline import Script, in_turns

from tailrace.app.board.page import page
from tailrace.app.cli import run
from tailrace.deployments.feed.deltas import fold
from tailrace.lab.timeline.playback import FRAMES, recording
from tailrace.lab.timeline.record import record

RECORDED = Path(__file__).parents[1] / "data" / "journal.jsonl.gz"


@pytest.fixture(scope="module")
def recorded():
    return record(gzip.open(RECORDED, "rt"))


def test_frames_begin_with_all_samples_waiting_and_end_with_none(recorded):
    played, state, tokens = recording("run", recorded), {}, []
    times = [at_s for at_s, _ in played.frames]
    assert times == sorted(times) and times[0] == 0.0 and len(times) <= FRAMES + 1
    for place, (_, changes) in enumerate(json.loads(json.dumps(played.frames))):
        fold(state, changes)
        service, here = state["service"], len(recorded.samples)
        assert service["running"] + service["waiting"] <= here and (place or service["waiting"] == here)
        running = sum(row["running"] - row["copies"] for row in state["replicas"].values())
        assert running >= service["running"]
        tokens.append(service["made"])
    assert tokens == sorted(tokens) and tokens[-1] == sum(chunk.new_tokens for chunk in recorded.chunks)
    assert not state["batches"] and not state["samples"] and not state["service"]["running"]


def test_each_sample_has_its_chunks_in_order(recorded):
    played = recording("run", recorded)
    assert played.samples.keys() == recorded.samples.keys()
    for name, sample in played.samples.items():
        counted = [one for one in sample["chunks"] if one["copy_of"] is None]
        assert [one["start"] for one in counted] == sorted(one["start"] for one in counted)
        assert sample["tokens"] == recorded.samples[name].tokens and sample["moves"] == recorded.samples[name].moves


def test_a_lost_replica_is_a_fault_and_news(tmp_path):
    script = Script()
    script.chunk("b0/p0#0:0", "a", 11.0, None)
    script.end(16.0, "b0/p0#0", "failed")
    script.event(13.0, "ReplicaLeft", replica_id="a", error="its node died")
    played = recording("run", record(script.lines()))
    state = {}
    for _, changes in played.frames:
        fold(state, changes)
    (fault,) = state["faults"].values()
    assert (fault["replica"], fault["text"]) == ("a", "its node died")
    assert any("has left" in row["text"] for row in state["news"].values())


def test_a_sample_between_two_turns_is_held_and_does_not_wait():
    state, seen = {}, {}
    for at_s, changes in recording("run", record(in_turns().lines())).frames:
        fold(state, changes)
        row = state["samples"].get("p0#0", {})
        seen[at_s] = [state["service"][key] for key in ("running", "waiting", "held")], row.get("state")
    assert seen[1.0] == seen[8.0] == ([1, 0, 0], "running")
    assert seen[4.0] == seen[9.5] == ([0, 0, 1], "held") and seen[6.5] == ([0, 1, 0], "waiting")


def test_a_sample_that_runs_where_the_journal_ends_is_shown_as_running():
    script = Script(groups=("p0",), samples=2)
    script.chunk("b0/p0#0:0", "a", 11.0, None)
    script.event(20.0, "ReplicaLeft", replica_id="b", error="stopped")
    state = {}
    for _, changes in recording("run", record(script.lines())).frames:
        fold(state, changes)
    assert [state["service"][key] for key in ("running", "waiting")] == [1, 1]
    assert {name: row["state"] for name, row in state["samples"].items()} == {"p0#0": "running", "p0#1": "waiting"}
    assert state["replicas"]["a"]["running"] == 1


def test_a_sample_whose_beaten_chunk_is_still_to_stop_runs_no_more():
    script = in_turns()
    for chunk, begin, end in (("0", 11.0, 15.0), ("1", 18.0, 24.0)):  # its turns end at 12 and 19 s, it at 20 s
        script.chunk(f"b0/p0#0:{chunk}~x", "b", begin, end, 0, "aborted", copy_of=f"b0/p0#0:{chunk}", method="x")
    script.submit(11.0, "b1", ("p0",), 1)
    script.event(26.0, "ReplicaLeft", replica_id="c", error="stopped")
    state, seen = {}, {}
    for at_s, changes in recording("run", record(script.lines())).frames:
        fold(state, changes)
        seen[at_s] = [state["service"][key] for key in ("running", "waiting", "held")]
    assert seen[4.0] == [0, 1, 1] and seen[12.0] == [0, 1, 0]
    script = Script(groups=("p0",), samples=1)
    script.chunk("b0/p0#0:0", "a", 10.0, 16.0, 0, "aborted")
    script.chunk("b0/p0#0:0~x", "c", 11.0, 13.0, 50, copy_of="b0/p0#0:0", method="x")
    script.chunk("b0/p0#0:1", "b", 15.0, 20.0, 50, "stop", start=50)
    state, seen = {}, {}
    for at_s, changes in recording("run", record(script.lines())).frames:
        fold(state, changes)
        seen[at_s] = state["samples"]["p0#0"]["state"], state["replicas"]["a"]["running"], state["service"]["waiting"]
    assert [seen[at_s] for at_s in (2.0, 4.0)] == [("running", 1, 0), ("waiting", 1, 1)]


def test_a_batch_keeps_its_name_whatever_commas_the_others_have():
    script = Script(groups=("p0",), samples=1)
    for number, batch in enumerate(("step 1, warm~1", "step 2~2")):
        script.submit(11.0 + number, batch, ("p0",), 1 + number)
    script.event(20.0, "ReplicaLeft", replica_id="a", error="stopped")
    state = {}
    for _, changes in recording("run", record(script.lines())).frames:
        fold(state, changes)
    shown = {row["name"]: row["samples"] for row in state["batches"].values()}
    assert shown == {"b0": 1, "step 1, warm": 1, "step 2": 2}


def test_the_page_of_a_recorded_run_has_a_slider_and_no_stream():
    assert 'data-kind="recorded"' in page(recorded=True) and 'data-kind="live"' in page()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_recording_and_its_samples_are_served_on_loopback_alone(recorded, anyio_backend):
    from tailrace.app.board.routes import make_playback

    app = make_playback(recording("run", recorded))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:1") as http:
        found = (await http.get("/board/recording")).json()
        assert found["name"] == "run" and found["frames"][0]["at_s"] == 0
        name = next(iter(recorded.samples))
        assert (await http.get("/board/sample", params={"id": name})).json()["chunks"]
        assert (await http.get("/board/sample", params={"id": "none"})).status_code == 204
        for path in ("/", "/board/recording", "/board/sample?id=x"):
            assert (await http.get(path, headers={"Host": "evil.example"})).status_code == 400


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), ("{}\n", "not a line of a journal")])
def test_a_file_that_is_no_journal_is_refused_in_one_line(content, said, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    assert run(["board", "--port", "0", "--journal", str(path)]) == 2
    assert said in capsys.readouterr().err
