"""The feed of deltas: all of them together are the state; trails and logs hold what the core did; costs are bounded."""

import asyncio
import json
from collections import defaultdict
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from test_rollout_cases import core_of, finish, submit, tick

from tailrace.app.board.news import news
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.snapshot import replica_statuses, sample_statuses
from tailrace.deployments.feed.acceptance import Acceptance
from tailrace.deployments.feed.deltas import KEPT, Deltas, change, fold
from tailrace.deployments.feed.feed import LOOKS_SHARE, Feed
from tailrace.deployments.feed.logs import Logs
from tailrace.deployments.feed.looks import Looks
from tailrace.deployments.feed.survey import LONGEST, PART, Survey, tokens_of
from tailrace.deployments.feed.trails import KEPT_CHUNKS, KEPT_ENDED, KEPT_FAULTS, Trails
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.drafts import DraftReport
from tailrace.deployments.messages.status import ServiceSnapshot
from tailrace.lab.fuzz.virtual_time import VirtualLoop
from tailrace.policies.protocol import actions as ac
from tailrace.policies.protocol import events as ev


def random_state(random: Random) -> dict:
    return {
        section: {
            f"row{n}": random.choice([1, "x", {"a": random.randrange(3)}]) for n in range(6) if random.random() < 0.5
        }
        for section in ("one", "two")
    }


def test_the_whole_state_with_later_changes_is_the_present_state():
    random, state, folded = Random(0), {}, {}
    for _ in range(300):
        now = random_state(random)
        changes = {section: change(state.get(section, {}), now[section]) for section in now}
        fold(folded, json.loads(json.dumps(changes)))
        state = now
        assert folded == state


def test_a_follower_that_reads_slowly_gets_the_whole_state_and_holds_nothing_up():
    async def story() -> None:
        deltas = Deltas("e")
        deltas.put(0.0, {"rows": {"a": 0}})
        slow, quick = deltas.follow(), deltas.follow()
        await anext(slow), await anext(quick)
        for number in range(1, KEPT + 5):
            deltas.put(float(number), {"rows": {"a": number}})
            found = json.loads(await anext(quick))
            assert (found["whole"], found["number"], found["sections"]) == (False, number + 1, {"rows": {"a": number}})
        late = json.loads(await anext(slow))
        assert late["whole"] and late["sections"] == {"rows": {"a": KEPT + 4}} and late["number"] == KEPT + 5
        assert len(deltas._kept) == KEPT

    asyncio.run(story())


@pytest.mark.parametrize(
    ("epoch", "number", "whole"),
    [("e", 9, False), ("e", 10 - KEPT, True), ("e", 11, True), ("other", 9, True), ("", 0, True)],
)
def test_a_follower_that_comes_back_reads_on_where_it_was_if_that_is_known(epoch, number, whole):
    async def story() -> dict:
        deltas = Deltas("e")
        for at_s in range(10):
            deltas.put(float(at_s), {"rows": {"a": at_s}})
        return json.loads(await anext(deltas.follow(epoch, number)))

    found = asyncio.run(story())
    assert (found["whole"], found["number"]) == (whole, 10)


class Clock:
    def __init__(self):
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def start(chunk: int, sample="b~1/p#0", replica="r", copy_of=None) -> ac.StartChunk:
    return ac.StartChunk(f"{sample}:{chunk}", sample, replica, 10 * chunk, 10, 0, 0, None, 20, (0, 0), "why", copy_of)


def test_a_trail_has_each_chunk_with_its_replica_reason_and_end():
    clock = Clock()
    trails = Trails(clock)
    trails.act(start(0, replica="r1"))
    trails.observe(ev.ChunkFinished(1.0, "b~1/p#0:0", 10, ev.ChunkEnd.LENGTH, 0))
    clock.s = 2.0
    trails.act(start(1, replica="r2"))
    trails.act(start(1, replica="r3", copy_of="b~1/p#0:1"))
    trails.act(ac.AbortChunk("b~1/p#0:1", "r2", True, "weights 2 replace 1"))
    trails.observe(ev.ChunkFailed(3.0, "b~1/p#0:1", "broken"))
    trail = trails.get("b~1/p#0")
    assert [(one.replica_id, one.end, one.ended_s) for one in trail.chunks[:1]] == [("r1", "length", 1.0)]
    assert trail.moves == 1, "a copy is no move"
    assert [one.text for one in trails.faults] == ["broken"] and trails.faults[0].sample_id == "b~1/p#0"


def test_the_end_of_a_replica_is_the_end_of_its_chunks_alone():
    trails = Trails(lambda: 5.0)
    trails.act(start(0, "b~1/p#0", "r1"))
    trails.act(start(0, "b~1/p#1", "r2"))
    trails.observe(ev.ReplicaLeft(6.0, "r1", "its node died"))
    (lost,), (left,) = trails.get("b~1/p#0").chunks, trails.get("b~1/p#1").chunks
    assert (lost.end, lost.error, left.end) == ("lost", "its node died", "")
    assert trails.faults[0].text == "it has left, with 1 chunks: its node died"


def test_trails_are_bounded_by_chunks_ended_samples_and_faults():
    trails = Trails(lambda: 0.0)
    for number in range(KEPT_CHUNKS + 7):
        trails.act(start(number))
        trails.observe(ev.ChunkFailed(0.0, f"b~1/p#0:{number}", f"error {number}"))
    trail = trails.get("b~1/p#0")
    assert (len(trail.chunks), trail.dropped, len(trails.faults)) == (KEPT_CHUNKS, 7, KEPT_FAULTS)
    for number in range(KEPT_ENDED + 5):
        trails.act(ac.EndSample(f"b~2/p#{number}", ac.SampleEnd.STOP, None, "stop"))
    assert len(trails._ended) == KEPT_ENDED and trails.get("b~2/p#4") is None and trails.get("b~2/p#5").end == "stop"
    trails.forget_live()
    assert not trails._live and not trails._running


def logs_of(trails: Trails, *live: str) -> Logs:
    """Logs of a service in which these batches are in flight, by their ids in the core, oldest first."""
    batches = SimpleNamespace(
        all=lambda: [SimpleNamespace(core_id=one, samples={}, status=lambda *_: None) for one in live]
    )
    core = SimpleNamespace(sample=lambda name: None)
    return Logs(batches, trails, lambda: core, lambda: 0.0, unix_s=0.0, peek=None)


def test_the_newest_of_several_batches_with_one_name_is_shown():
    trails = Trails(Clock())
    for number in (9, 10):
        trails.act(ac.EndSample(f"b~n{number}/p#0", ac.SampleEnd.STOP, None, "done"))
    logs = logs_of(trails)
    assert logs.sample("b/p#0").sample_id == "b~n10/p#0" and logs.batch("b").batch_id == "b~n10"
    trails.act(start(0, "b~n11/p#0"))
    trails.act(start(0, "b~n12/q#0"))
    logs = logs_of(trails, "b~n11", "b~n12")
    assert logs.sample("b/p#0").sample_id == "b~n11/p#0" and logs.batch("b").batch_id == "b~n12"
    assert logs.sample("b~n9/p#0").sample_id == "b~n9/p#0" and logs.batch("b~n9").batch_id == "b~n9"


@pytest.mark.parametrize(
    ("name", "sample_id"),
    [
        ("b/p#1#0", "b~n1/p%231#0"),
        ("b/50%#0", "b~n1/50%25#0"),
        ("a/b/p#0", "a%2Fb~n1/p#0"),
        ("a/b/p/q#0", "a~n1/b/p/q#0"),
        ("a%/b/p#0", "a%25%2Fb~n1/p#0"),
    ],
)
def test_a_sample_is_found_by_its_driver_s_name_for_it(name, sample_id):
    trails = Trails(Clock())
    trails.act(ac.EndSample(sample_id, ac.SampleEnd.STOP, None, "done"))
    assert logs_of(trails).sample(name).sample_id == sample_id
    assert logs_of(trails).sample(name[:-1] + "1") is None


@pytest.mark.parametrize(("copy_wins", "tokens"), [(True, 20), (False, 14)])
def test_the_log_of_a_sample_has_the_tokens_of_the_chunk_that_has_won_its_race(copy_wins, tokens):
    trails = Trails(Clock())
    trails.act(start(1))
    trails.act(replace(start(2), start=10, copy_of="b~1/p#0:1"))
    trails.observe(ev.ChunkFinished(1.0, "b~1/p#0:2", 10, ev.ChunkEnd.ABORTED, 0), counts=copy_wins)
    trails.observe(ev.ChunkFinished(1.5, "b~1/p#0:1", 4, ev.ChunkEnd.ABORTED, 0), counts=not copy_wins)
    trails.act(ac.EndSample("b~1/p#0", ac.SampleEnd.CANCELLED, None, "cancelled"))
    assert logs_of(trails).sample("b~1/p#0").tokens == tokens


def test_a_survey_of_many_samples_takes_several_looks_and_finds_the_longest():
    core = core_of(chunk_tokens=10, r=3)
    submit(core, ev.GroupSpec("b~1/p", 16, 2 * PART + 1, 100))
    chunks = [one for one in tick(core) if isinstance(one, ac.StartChunk)]
    core.observe(ev.TokensStreamed(0.0, {chunks[0].chunk_id: 7}, 0.0))
    whole = Survey(count=2, part=None)
    whole.look(core)
    assert (
        whole.tokens == {"b": 7} and len(whole.longest()) == 2 and whole.waiting.total() == 2 * PART + 1 - len(chunks)
    )
    survey = Survey()
    for _ in range(2):
        survey.look(core)
        assert not survey.longest() and not survey.waiting
    survey.look(core)
    assert len(survey.longest()) == LONGEST and survey.longest()[0].sample_id == chunks[0].sample_id
    assert survey.tokens == {"b": 7}
    assert survey.waiting == {"room on any replica": 2 * PART + 1 - len(chunks)}


def test_a_waiting_sample_says_what_it_waits_for():
    core = core_of("group_static", chunk_tokens=10, r=3)
    submit(core, ev.GroupSpec("p", 16, 8, 100))
    started = [one for one in tick(core) if isinstance(one, ac.StartChunk)]
    waiting = [core.sample(f"p#{n}") for n in range(8) if f"p#{n}" not in {one.sample_id for one in started}]
    assert {core.awaited.by(one) for one in waiting} == {"room on the replica of its group"}
    core.observe(ev.ReplicaLeft(0.0, "r", "gone"))
    assert core.awaited.by(core.sample("p#0")) == "a replica that is ready" and core.sample("p#9") is None


def test_tokens_of_an_ended_chunk_count_once_while_its_sample_waits():
    core = core_of(chunk_tokens=10, r=3)
    submit(core, ev.GroupSpec("p", 16, 1, 100))
    (chunk,) = tick(core)
    core.observe(ev.TokensStreamed(0.0, {chunk.chunk_id: 7}, 0.0))
    assert tokens_of(core.sample("p#0")) == 7
    finish(core, chunk)
    assert core.sample("p#0").state.value == "waiting" and tokens_of(core.sample("p#0")) == 10


def report(name: str, tokens: int) -> EngineStats:
    work = {"tokens": tokens, "verifications": tokens // 2, "drafted.mate": 8, "accepted.mate": 4}
    return EngineStats(name, 0, 16, 100, 4, 100, 0, 0.0, work=work)


def looks_of(core, reports) -> Looks:
    trails, registry = Trails(lambda: 0.0), ReplicaRegistry()
    registry.reports, registry.observed_at = reports, defaultdict(float)

    def snapshot(survey: Survey) -> ServiceSnapshot:
        survey.look(core)
        counts = core.counts()
        return ServiceSnapshot(
            **{name: counts[name] for name in ("waiting", "running", "held")},
            waiting_for=survey.waiting,
            longest=sample_statuses(core, survey.longest(), trails),
            replicas=replica_statuses(core, registry, 0.0),
            batches=(),
            observed_s=0.0,
            waits_for=None,
            policies={},
        )

    return Looks(snapshot)


def test_looks_give_the_rows_that_have_changed_alone():
    core, reports = core_of(chunk_tokens=10, r=30, q=30), {"r": report("r", 10), "q": report("q", 20)}
    looks = looks_of(core, reports)
    first = looks.look()
    assert first["replicas"].keys() == {"r", "q"} and first["replicas"]["r"]["drafted"] == {"mate": 8}
    assert {name: rows for name, rows in looks.look().items() if rows} == {}
    reports["r"] = report("r", 25)
    again = looks.look()
    assert again["replicas"].keys() == {"r"} and again["service"] == {"made": 15}
    reports["r"] = report("r", 5)  # it has restarted: the sum does not fall
    assert "service" not in {name for name, rows in looks.look().items() if rows}
    submit(core, ev.GroupSpec("p", 16, 1, 100))
    (chunk,) = tick(core)
    seen = looks.look()
    assert seen["samples"]["p#0"]["state"] == "running" and seen["replicas"][chunk.replica_id]["running"] == 1
    core.observe(ev.ReplicaLeft(0.0, chunk.replica_id, "gone"))
    gone = looks.look()
    assert gone["replicas"][chunk.replica_id] is None and gone["samples"]["p#0"]["state"] == "waiting"


def test_looks_decide_nothing():
    """Law 4: a core that is looked at answers as one that is not."""
    answers = []
    for watched in (False, True):
        core = core_of(chunk_tokens=10, r=30, q=30)
        looks, acted = looks_of(core, {}), []
        submit(core, ev.GroupSpec("p", 16, 12, 60))
        while actions := tick(core):
            acted += actions
            for chunk in (one for one in actions if isinstance(one, ac.StartChunk)):
                finish(core, chunk)
                if watched:
                    looks.look()
        answers.append(acted)
    assert answers[0] == answers[1] and len(answers[0]) > 24


@pytest.mark.parametrize(("took_s", "looks"), [(0.0, 200), (0.001, 200), (0.01, 40)])
def test_looks_that_take_longer_come_seldomer_and_take_a_bounded_share(took_s, looks):
    async def story() -> int:
        clock, made = [0.0], []

        def look() -> dict:
            clock[0] += took_s
            made.append(clock[0])
            return {}

        feed = Feed(SimpleNamespace(look=look, begin=lambda: None), "e", None, pytest.fail, spent_s=lambda: clock[0])
        follower = feed.follow("", 0)
        await anext(follower)
        await asyncio.sleep(100.0)
        await follower.aclose()
        return len(made)

    made = VirtualLoop().run_until_complete(story())
    assert looks <= made <= 1.3 * looks, f"in 100 s; {100.0 * LOOKS_SHARE} s of them may be theirs"


def test_acceptance_adds_up_over_chunks_by_source_and_position():
    acceptance = Acceptance()
    assert acceptance.row() == {}
    for sources, accepted in (([1, 1, 2], 2), ([0, 2], 0)):
        parts = bytearray(sources), bytearray(sources[:accepted]), bytearray([accepted])
        acceptance.add(DraftReport.of(1, *parts, 4))
    acceptance.add(None)
    row = json.loads(json.dumps(acceptance.row()))
    assert (row["verifications"], row["positions"]) == (2, [1, 1, 0, 0])
    assert row["drafted"] == {"own": 1, "mate": 2, "history": 2} and row["accepted"] == {"mate": 2}


def replica(state="ready", weights=3, aside="") -> dict:
    return {"state": state, "weights": weights, "aside": aside}


def a_batch(tail=False) -> dict:
    return {"name": "step-7", "samples": 8, "tail": tail}


def test_news_are_lines_about_changes():
    known = {
        "replicas": {"r1": replica(), "r2": replica(), "r4": replica()},
        "batches": {"step-7~a1": a_batch()},
        "service": {"weights": 3, "paused": False},
        "contained": {"turn.ValueError": 1},
    }
    changes = {
        "replicas": {"r1": replica("closing"), "r2": None, "r3": replica(), "r4": replica("aside", 3, "3 failed")},
        "batches": {"step-7~a1": a_batch(True), "step-8~a2": a_batch() | {"name": "step-8"}},
        "service": {"weights": 4, "paused": True, "wanted": 1, "wanted_why": "tail: 2 of 9 run"},
        "contained": {"turn.ValueError": 3},
        "faults": {"5": {"at_s": 1.0, "sample": "", "replica": "r2", "text": "it has left"}},
    }
    assert news(known, changes) == [
        "batch step-7 is in its tail", "batch step-8: 8 samples came", "contained: turn.ValueError, +2", "paused",
        "r2: it has left", "replica r1 is to be given back", "replica r2 has left", "replica r3 has joined",
        "replica r4 is set aside: 3 failed", "replicas wanted: 1, tail: 2 of 9 run", "weights 3 to 4",
    ]  # fmt: skip
    assert news(known, {}) == [] and news(known, {"batches": {"step-7~a1": None}}) == ["batch step-7 is over"]
