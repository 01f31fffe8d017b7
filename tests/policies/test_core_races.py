"""Races in the core: who is first is the chunk, the others count for nobody; copies are in nobody's way."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import measured

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.racing import FastestOfN, MethodProfile
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, EndSample, SampleEnd, StartChunk
from tailrace.policies.protocol.performance import MethodAcceptance, chance

PROFILE = settings(max_examples=50, derandomize=True, deadline=None, database=None)
METHODS = ("group", "history", "model")
RUNGS = tuple(MethodProfile(name, ((0.0, 1.0), (1.0, 4.0)), (0.5,)) for name in METHODS)
RACING = FastestOfN(room=3, rungs=RUNGS)


def core_of(
    replicas=3, samples=2, running=4, chunk_tokens=100, methods=METHODS, exactness="bits", **knobs
) -> tuple[RolloutCore, dict[str, StartChunk]]:
    """With one group on it; and what has started, copies among it."""
    policies = Policies(chunking={"type": "fixed", "chunk_tokens": chunk_tokens}, racing=RACING, **knobs)
    core = RolloutCore(policies, limits=Limits(1, replicas) if "tail" in knobs else None, exactness=exactness)
    for index in range(replicas):
        core.observe(ev.ReplicaJoined(0.0, f"r{index}", 16, 100, running, 0, 0, "n", methods))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, samples, 200),)))
    return core, starts(core.decide(ev.Tick(0.0)))


def starts(actions) -> dict[str, StartChunk]:
    return {action.chunk_id: action for action in actions if isinstance(action, StartChunk)}


def stops(actions) -> set[str]:
    return {action.chunk_id for action in actions if isinstance(action, AbortChunk)}


def is_beaten(core, chunk_id: str) -> bool:
    return core._running.chunks[chunk_id].beaten


def is_copy(core, chunk_id: str) -> bool:
    return core._running.chunks[chunk_id].copy_of is not None


def finish(core, chunk_id, tokens=100, end=ev.ChunkEnd.LENGTH, now=1.0, **more) -> None:
    core.observe(ev.ChunkFinished(now, chunk_id, tokens, end, 0, **more))


# ---- over random plays -----------------------------------------------------------------------------


class Play:
    """A random play, and what its events and actions alone say of it; whether a chunk is beaten, the core is asked."""

    def __init__(self, data, tail, exactness):
        chunking, self.exactness = {"type": "fixed", "chunk_tokens": 7}, exactness
        policies = Policies(chunking=chunking, racing=RACING, tail=tail)
        self.core = RolloutCore(policies, limits=Limits(1, 4), exactness=exactness)
        self.data, self.now, self.joined, self.submitted = data, 0.0, 0, 0
        self.running: dict[str, StartChunk] = {}
        self.up: list[str] = []
        self.tokens: dict[str, int] = defaultdict(int)
        self.ended: list[str] = []

    def take(self, choices: int) -> int:
        return self.data.draw(st.integers(0, choices - 1))

    def step(self) -> None:
        self.now += 0.4 + self.take(3)
        what = (self.join, self.submit, self.lose, self.fail, self.finish, self.finish, self.finish)[self.take(7)]
        what()
        self.tick()

    def join(self) -> None:
        name = f"r{self.joined}"
        self.core.observe(ev.ReplicaJoined(self.now, name, 4, 10 + self.take(20), 1 + self.take(4), 0, 0, "n", METHODS))
        self.core.observe(measured(self.now, name, 1e3, 1e4, 0.0, 0.02, 0.001, self.now))
        self.up.append(name)
        self.joined += 1

    def submit(self) -> None:
        name = f"b{self.submitted}"
        self.core.observe(ev.SamplesSubmitted(self.now, name, (ev.GroupSpec(name, 3, 2, 16),)))
        self.submitted += 1

    def lose(self) -> None:
        if self.up and not self.take(3):
            gone = self.up.pop(self.take(len(self.up)))
            self.core.observe(ev.ReplicaLeft(self.now, gone, "spot"))
            self.running = {c: start for c, start in self.running.items() if start.replica_id != gone}

    def pop(self) -> StartChunk | None:
        return self.running.pop(sorted(self.running)[self.take(len(self.running))]) if self.running else None

    def fail(self) -> None:
        if start := self.pop():
            self.core.observe(ev.ChunkFailed(self.now, start.chunk_id, "fell over"))

    def finish(self) -> None:
        if not (start := self.pop()):
            return
        end = (ev.ChunkEnd.LENGTH, ev.ChunkEnd.STOP, ev.ChunkEnd.ABORTED)[self.take(3)]
        made = start.max_tokens if end is ev.ChunkEnd.LENGTH else self.take(1 + start.max_tokens)
        lost, is_a_copy = is_beaten(self.core, start.chunk_id), is_copy(self.core, start.chunk_id)
        event = ev.ChunkFinished(self.now, start.chunk_id, made, end, 0)
        given_way = is_a_copy and (self.exactness == "law" or end is ev.ChunkEnd.ABORTED)
        assert self.core.counts_tokens(event) == (not (lost or given_way))
        counted = self.core.counts_tokens(event)
        self.core.observe(event)
        if not counted:
            return
        self.tokens[start.sample_id] += made
        assert all(is_beaten(self.core, other.chunk_id) for other in self.mates(start))

    def mates(self, start: StartChunk) -> list[StartChunk]:
        return [other for other in self.running.values() if other.sample_id == start.sample_id]

    def tick(self) -> None:
        actions = self.core.decide(ev.Tick(self.now))
        for start in starts(actions).values():
            assert start.chunk_id not in self.running and start.start == self.tokens[start.sample_id]
            live = [other for other in self.mates(start) if not is_beaten(self.core, other.chunk_id)]
            assert bool(live) == (start.copy_of is not None)
            assert start.replica_id not in {other.replica_id for other in live}
            assert start.copy_of is None or start.method not in {other.method or METHODS[0] for other in live}
            self.running[start.chunk_id] = start
        chunks = self.core._running.chunks
        assert set(self.running) == set(chunks)
        assert all(chunk.aborting for chunk in chunks.values() if chunk.beaten), "who is beaten is told to stop"
        unbeaten = {start.sample_id for c, start in self.running.items() if not is_beaten(self.core, c)}
        assert self.core.counts()["running"] == len(unbeaten)
        self.ended += [action.sample_id for action in actions if isinstance(action, EndSample)]

    def run_out(self) -> None:
        """One more replica, and chunks end until nothing is left."""
        self.join()
        self.core.observe(ev.ReplicaJoined(self.now, "last", 4, 100, 4, 0, 0, "n"))
        for _ in range(200):
            self.now += 1.0
            self.tick()
            if not self.running:
                return
            self.finish()


@pytest.mark.slow
@PROFILE
@given(
    data=st.data(),
    tail=st.sampled_from(("hold", *({"type": t, "after_s": 0.0} for t in ("consolidate", "auto")))),
    exactness=st.sampled_from(("bits", "law")),
)
def test_the_laws_hold_while_copies_race(data, tail, exactness):
    play = Play(data, tail, exactness)
    for _ in range(data.draw(st.integers(5, 40))):
        play.step()
    play.run_out()
    assert sorted(play.ended) == sorted(f"b{i}#{j}" for i in range(play.submitted) for j in (0, 1))
    assert play.core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}
    assert not play.core._running.copies and all(
        v.kv_free_tokens == v.kv_capacity_tokens for v in play.core.replicas.views()
    )


# ---- one by one ------------------------------------------------------------------------------------


def test_free_replicas_race_with_methods_that_the_sample_has_not():
    core, started = core_of()
    copies = {c.chunk_id: c for c in started.values() if c.copy_of}
    assert {(c.copy_of, c.method) for c in copies.values()} == {
        ("g#0:0", "history"), ("g#0:0", "model"), ("g#1:0", "history"),
    }, "two replicas draft by one method, one by the other"  # fmt: skip
    for copy in copies.values():
        original = started[copy.copy_of]
        assert (copy.start, copy.max_tokens) == (original.start, original.max_tokens)
        assert copy.replica_id != original.replica_id
    assert core.counts() == {"waiting": 0, "running": 2, "held": 0, "batches": 1}


@pytest.mark.parametrize("winner", ["g#0:0", "g#0:0~model"])
def test_the_first_to_end_is_the_chunk_and_the_others_stop(winner):
    core, started = core_of()
    others = {c for c, s in started.items() if s.sample_id == "g#0"} - {winner}
    finish(core, winner, 60, ev.ChunkEnd.STOP, drafted_tokens=9, accepted_tokens=4)
    actions = core.decide(ev.Tick(1.0))
    assert stops(actions) == others and all(is_beaten(core, c) for c in others)
    assert [a.end for a in actions if isinstance(a, EndSample)] == [SampleEnd.STOP]
    for chunk_id in others:
        finish(core, chunk_id, 99, ev.ChunkEnd.ABORTED)
    actions = core.decide(ev.Tick(2.0))
    assert not [a for a in actions if isinstance(a, EndSample)] and core.counts()["running"] == 1


def test_a_sample_goes_on_behind_its_winner_while_the_beaten_still_run():
    core, _ = core_of()
    finish(core, "g#0:0~history", 100)
    again = starts(core.decide(ev.Tick(1.0)))
    assert again["g#0:1"].start == 100
    finish(core, "g#0:0", 100)  # it had come to its end as well, a moment later
    core.decide(ev.Tick(2.0))
    finish(core, "g#0:1", 100)
    core.decide(ev.Tick(3.0))
    assert core.counts()["running"] == 1


def test_a_copy_goes_on_where_its_original_was_lost():
    core, started = core_of()
    core.observe(ev.ReplicaLeft(1.0, started["g#0:0"].replica_id, "spot"))
    actions = core.decide(ev.Tick(1.0))
    assert not [c for c, s in starts(actions).items() if s.sample_id == "g#0" and not s.copy_of], "no new start"
    heir = next(c for c, s in started.items() if s.copy_of == "g#0:0" and core.is_running(c))
    assert not is_beaten(core, heir)
    finish(core, heir, 100)
    assert starts(core.decide(ev.Tick(2.0)))["g#0:1"].start == 100


def test_copies_give_way_to_samples_that_wait():
    core, started = core_of(samples=2, running=2)
    copies = {c for c, s in started.items() if s.copy_of}
    assert copies
    core.observe(ev.SamplesSubmitted(1.0, "c", (ev.GroupSpec("h", 10, 6, 200),)))
    actions = core.decide(ev.Tick(1.0))
    assert stops(actions) == copies and not [s for s in starts(actions).values() if s.copy_of]
    for chunk_id in copies:
        finish(core, chunk_id, 3, ev.ChunkEnd.ABORTED)
    actions = core.decide(ev.Tick(2.0))
    assert starts(actions) and not [a for a in actions if isinstance(a, EndSample)], "their tokens count for nobody"


def test_a_copy_that_goes_on_alone_gives_no_way():
    core, started = core_of(samples=2, running=2)
    core.observe(ev.ReplicaLeft(1.0, started["g#0:0"].replica_id, "spot"))
    core.decide(ev.Tick(1.0))
    (heir,) = [c for c, s in started.items() if s.sample_id == "g#0" and core.is_running(c) and not is_copy(core, c)]
    core.observe(ev.SamplesSubmitted(2.0, "c", (ev.GroupSpec("h", 10, 6, 200),)))
    assert heir != "g#0:0" and heir not in stops(core.decide(ev.Tick(2.0)))


def test_free_room_is_looked_at_once_a_second():
    core, _ = core_of()
    finish(core, "g#0:0~history", 100, now=0.2)
    copies = {}
    for now in (0.2, 0.5, 0.9, 1.0):
        copies[now] = [s for s in starts(core.decide(ev.Tick(now))).values() if s.copy_of]
        for chunk_id in [c for c in core._running.chunks if is_beaten(core, c)]:
            finish(core, chunk_id, 1, ev.ChunkEnd.ABORTED, now)
    assert not copies[0.2] + copies[0.5] + copies[0.9] and {s.sample_id for s in copies[1.0]} == {"g#0"}


def test_copies_leave_a_replica_that_is_given_back():
    core, started = core_of(replicas=2, samples=2, tail={"type": "consolidate", "after_s": 0.0, "max_slowdown": 9.0})
    for name in ("r0", "r1"):
        core.observe(measured(0.0, name, 1e3, 1e4, 0.0, 0.02, 0.001, 0.0))
    actions = core.decide(ev.Tick(1.0))
    assert {c for c, s in started.items() if s.replica_id == "r1" and s.copy_of} <= stops(actions)


def test_a_cancelled_batch_ends_its_races():
    core, started = core_of()
    core.observe(ev.BatchCancelled(1.0, "b"))
    assert stops(core.decide(ev.Tick(1.0))) == set(started)
    for chunk_id in started:
        finish(core, chunk_id, 1, ev.ChunkEnd.ABORTED)
    actions = core.decide(ev.Tick(2.0))
    assert [a.end for a in actions if isinstance(a, EndSample)] == [SampleEnd.CANCELLED] * 2
    assert core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}


def test_a_winner_s_replica_is_where_its_sample_ran_last():
    core, started = core_of(placement={"type": "cost_aware", "min_gain_s": 0.0})
    assert started["g#0:0"].replica_id != started["g#0:0~model"].replica_id
    finish(core, "g#0:0~model", 100)
    again = starts(core.decide(ev.Tick(1.0)))["g#0:1"]
    assert again.replica_id == started["g#0:0~model"].replica_id


def test_a_winner_s_node_is_where_the_kv_of_its_sample_lies():
    core = RolloutCore(Policies(chunking={"type": "fixed", "chunk_tokens": 100}, racing=RACING))
    for name in ("r0", "r1"):
        core.observe(ev.ReplicaJoined(0.0, name, 16, 100, 4, 0, 0, f"node of {name}", METHODS))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, 1, 200),)))
    (copy,) = [s for s in starts(core.decide(ev.Tick(0.0))).values() if s.copy_of]
    finish(core, copy.chunk_id, 100)
    assert core.sample("g#0").last_node == f"node of {copy.replica_id}"


def test_drafts_of_a_copy_are_none_of_its_samples_own_method():
    core, _ = core_of()
    finish(core, "g#0:0~history", 100, drafted_tokens=90, tested_tokens=80, accepted_tokens=70)
    finish(core, "g#1:0", 100, drafted_tokens=60, tested_tokens=50, accepted_tokens=40)
    tested = {name: (core.sample(name).tested_tokens, core.sample(name).accepted_tokens) for name in ("g#0", "g#1")}
    assert tested == {"g#0": (0, 0), "g#1": (50, 40)}


def outlook(core, replicas: int = 3):
    return core._races.outlook(replicas)


def test_what_races_may_bring_goes_by_the_drafts_of_chunks_that_are_no_copies():
    core, _ = core_of()
    ladder = RACING.method_table
    usual = ladder.gain("group", RACING.usual)
    assert outlook(core) == (3, 2, pytest.approx(usual)) and usual < ladder.gain("group", 0.1)
    finish(core, "g#0:0", 100, drafted_tokens=400, tested_tokens=100, accepted_tokens=10)
    finish(core, "g#1:0~history", 100, drafted_tokens=100, tested_tokens=100, accepted_tokens=99)
    core.decide(ev.Tick(1.0))
    own = ladder.gain("group", round(chance(10, 100, RACING.usual), 2))
    assert outlook(core).gain == pytest.approx((own + usual) / 2)
    drafts = MethodAcceptance("group", 80.0, 92.0)
    core.observe(measured(1.5, "r0", acceptance=(drafts,)))
    assert outlook(core).gain < (own + ladder.gain("group", 0.8)) / 2, "what replicas have measured is usual now"


def test_nothing_is_expected_of_races_without_room_or_policy():
    core, _ = core_of()
    assert outlook(core, 1).copies == 2 and outlook(core, 0).copies == 0
    crowded, _ = core_of(replicas=1, samples=3)
    assert outlook(crowded, 1) == (3, 0, 1.0)
    alone = RolloutCore(Policies())
    assert outlook(alone) == (0, 0, 1.0)


@pytest.mark.parametrize("methods", [(), ("group",), ("group", "ngram"), ("history", "unheard of")])
def test_nobody_races_by_a_method_that_no_replica_has_beside_its_own(methods):
    """Without a draft model a copy would draft from the same index as its original, and only take time."""
    core, started = core_of(methods=methods)
    assert not [start for start in started.values() if start.copy_of]
    assert outlook(core) == (3, 0, 1.0)


def test_a_method_that_comes_is_raced_with():
    core, started = core_of(methods=("group", "history"))
    assert {start.method for start in started.values() if start.copy_of} == {"history"}
    for replica_id in ("r0", "r1", "r2"):
        core.observe(ev.ReplicaJoined(1.0, replica_id, 16, 100, 4, 0, 0, "n", ("model", "group", "history")))
    for chunk_id in [chunk_id for chunk_id, start in started.items() if start.copy_of is None]:
        finish(core, chunk_id, now=2.0)
    again = starts(core.decide(ev.Tick(3.0)))
    assert {start.method for start in again.values() if start.copy_of} <= {"group", "history"}
    assert "group" in {start.method for start in again.values()}


def test_a_chunk_for_which_no_draft_model_is_to_draft_races_by_other_methods_than_what_is_left():
    """It drafts by what its replicas have beside the model."""
    plans = {"type": "planned", "acceptance": 0.0}
    _, started = core_of(methods=("model", "group", "history"), draft_models=plans)
    originals = [start for start in started.values() if start.copy_of is None]
    assert {(start.way.window, start.method) for start in originals} == {(0, "group")}
    assert "group" not in {start.method for start in started.values() if start.copy_of}
    _, started = core_of(methods=("group", "history"), draft_models=plans)
    assert {start.method for start in started.values() if start.copy_of is None} == {None}, "there is no model anyway"


def test_nobody_races_unless_told_to():
    core = RolloutCore(Policies())
    core.observe(ev.ReplicaJoined(0.0, "r0", 16, 100, 4, 0, 0))
    core.observe(ev.ReplicaJoined(0.0, "r1", 16, 100, 4, 0, 0))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, 1, 200),)))
    assert len(starts(core.decide(ev.Tick(0.0)))) == 1


def test_a_copy_that_follows_a_lost_one_has_another_name():
    """A late answer of the lost one would be taken for its own."""
    core, before = core_of(samples=1)
    copy_id = next(name for name, start in before.items() if start.copy_of is not None)
    core.observe(ev.ChunkFailed(1.5, copy_id, "its replica is gone"))
    after = starts(core.decide(ev.Tick(2.5)))
    again = next(start for start in after.values() if start.method == before[copy_id].method)
    assert again.chunk_id != copy_id and not core.is_running(copy_id)


@pytest.mark.parametrize("which", ["original", "copy"])
def test_a_sample_that_no_replica_can_run_ends_at_the_first_refusal(which):
    core, first = core_of(samples=1)
    (original,) = (name for name, start in first.items() if start.copy_of is None)
    copies = [name for name, start in (first | starts(core.decide(ev.Tick(1.0)))).items() if start.copy_of is not None]
    assert copies
    refused = original if which == "original" else copies[0]
    core.observe(ev.ChunkFailed(2.0, refused, "too hot", of_sample=True))
    actions = core.decide(ev.Tick(2.5))
    assert [(one.end, one.error) for one in actions if isinstance(one, EndSample)] == [(SampleEnd.FAILED, "too hot")]
    assert stops(actions) == {original, *copies} - {refused} and not starts(actions)
    for other in sorted({original, *copies} - {refused}):
        core.observe(ev.ChunkFailed(3.0, other, "too hot", of_sample=True))
    assert not any(isinstance(one, EndSample) for one in core.decide(ev.Tick(3.5)))
    assert not any(core.counts().values())


def racing() -> RolloutCore:
    """One sample of a group of 10 tokens, whose original and copy run on two replicas."""
    core = RolloutCore(Policies(racing="fastest_of_n", lanes="none", chunking={"type": "fixed", "chunk_tokens": 100}))
    for name in ("r0", "r1"):
        core.observe(ev.ReplicaJoined(0.0, name, 16, 1000, 8, 0, 0, name, ("model", "group")))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, 1, 400),)))
    assert len(starts(core.decide(ev.Tick(0.1)))) == 2
    return core


def test_tokens_that_a_beaten_chunk_reports_late_are_none_of_the_next_chunk():
    core = racing()
    (copy,) = [one for one in core._running.chunks if is_copy(core, one)]
    (original,) = [one for one in core._running.chunks if one != copy]
    core.observe(ev.ChunkFinished(3.0, copy, 100, ev.ChunkEnd.LENGTH, 0))
    core.decide(ev.Tick(3.0))
    core.observe(ev.TokensStreamed(3.1, {original: 97}, 3.05))
    sample = core.sample("g#0")
    assert (sample.generated_tokens, sample.streamed_tokens) == (100, 0)


def test_the_kv_of_a_copy_that_gives_way_is_not_kept():
    core = racing()
    (copy,) = [chunk for chunk in core._running.chunks.values() if chunk.copy_of is not None]
    assert not core._running._worth_keeping(copy) and core._running._worth_keeping(copy.copy_of)
