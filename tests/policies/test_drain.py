"""Samples that end under the weights that they began with, by `kv_on_update: finish`: stories, and laws over plays."""

from collections import defaultdict

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from rollout_machine import CHUNKS, TURNS, Ledger, play, policies_of
from test_rollout_cases import submit, tick

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, EmitGroup, EndSample, StartChunk

PROFILE = settings(deadline=None, database=None)


def core_of(*replicas: str, blocks: int = 40, max_running: int = 8) -> RolloutCore:
    core = RolloutCore(Policies(kv_on_update="finish", chunking={"type": "fixed", "chunk_tokens": 16}))
    for name in replicas:
        joins(core, name, 0, blocks, max_running)
    return core


def joins(core: RolloutCore, name: str, version: int, blocks: int = 40, max_running: int = 8) -> None:
    core.observe(ev.ReplicaJoined(0.0, name, 16, blocks, max_running, 0, version))


def ends(core: RolloutCore, start: StartChunk, end: str = "length", tokens: int | None = None) -> None:
    tokens = start.max_tokens if tokens is None else tokens
    core.observe(ev.ChunkFinished(0.0, start.chunk_id, tokens, ev.ChunkEnd(end), start.weights_version))


def starts(actions) -> list[StartChunk]:
    return [action for action in actions if isinstance(action, StartChunk)]


def test_samples_keep_their_weights_and_new_ones_start_on_the_replica_that_was_emptied():
    core = core_of("a", "b")
    submit(core, ev.GroupSpec("old", 16, 4, 64))
    running = starts(tick(core))
    assert {one.replica_id for one in running} == {"a", "b"}
    for one in running:
        ends(core, one)
    running = starts(tick(core))
    core.observe(ev.WeightsChanged(0.0, 1))
    submit(core, ev.GroupSpec("new", 16, 2, 64), batch_id="c")
    actions = tick(core)
    assert not [one for one in actions if isinstance(one, AbortChunk)], "the speeds are not known: chunks end first"
    (emptied,) = [one for one in "ab" if not starts(actions) and one in core._drain._emptied]
    other = "b" if emptied == "a" else "a"
    for one in running:
        ends(core, one)
    running = starts(tick(core))
    assert {(one.replica_id, one.weights_version, one.sample_id[:3]) for one in running} == {(other, 0, "old")}
    assert not core.replicas.keeps(emptied) and core.replicas.keeps(other), "the shell may load its weights"
    joins(core, emptied, 1)
    fresh = starts(tick(core))
    assert {(one.replica_id, one.weights_version, one.sample_id[:3]) for one in fresh} == {(emptied, 1, "new")}
    for one in running:
        ends(core, one, "stop")
    tick(core)
    assert not core.replicas.kept, "the last replica is let go with its last sample"


def test_an_idle_service_lets_go_of_all_at_once():
    core = core_of("a", "b")
    core.observe(ev.WeightsChanged(0.0, 1))
    tick(core)
    assert not core.replicas.kept and not core._drain._each


def test_a_single_replica_ends_its_samples_first():
    core = core_of("a")
    submit(core, ev.GroupSpec("old", 16, 1, 32))
    (running,) = starts(tick(core))
    core.observe(ev.WeightsChanged(0.0, 1))
    submit(core, ev.GroupSpec("new", 16, 1, 32), batch_id="c")
    ends(core, running)
    (running,) = starts(tick(core))
    assert running.sample_id == "old#0" and running.weights_version == 0
    ends(core, running)
    assert not starts(tick(core)) and not core.replicas.keeps("a")
    joins(core, "a", 1)
    assert [one.sample_id for one in starts(tick(core))] == ["new#0"]


def test_samples_of_a_lost_last_replica_continue_under_the_newest_weights():
    core = core_of("a", "b")
    submit(core, ev.GroupSpec("old", 16, 2, 64))
    for one in starts(tick(core)):
        ends(core, one)
    running = starts(tick(core))
    core.observe(ev.WeightsChanged(0.0, 1))
    tick(core)
    for one in running:
        ends(core, one)
    running = starts(tick(core))
    (keeper,) = {one.replica_id for one in running}
    joins(core, "b" if keeper == "a" else "a", 1)
    core.observe(ev.ReplicaLeft(0.0, keeper, "gone"))
    again = starts(tick(core))
    assert {(one.sample_id, one.weights_version, one.kv_version) for one in again} == {("old#0", 1, 1), ("old#1", 1, 1)}


def test_a_sample_without_a_token_starts_under_the_newest_weights():
    core = core_of("a")
    submit(core, ev.GroupSpec("g", 16, 1, 32))
    (running,) = starts(tick(core))
    core.observe(ev.WeightsChanged(0.0, 1))
    ends(core, running, "aborted", 0)
    assert not starts(tick(core))
    joins(core, "a", 1)
    (running,) = starts(tick(core))
    assert running.weights_version == 1


def test_as_samples_end_the_others_gather_on_fewer_replicas():
    core = core_of("a", "b", "c", "d")
    submit(core, ev.GroupSpec("old", 16, 12, 640))
    running = starts(tick(core))
    core.observe(ev.WeightsChanged(0.0, 1))
    tick(core)
    kept = [len(core.replicas.kept[0])]
    for _ in range(11):
        for one in running[1:]:
            ends(core, one)
        ends(core, running[0], "stop")
        running = starts(tick(core))
        kept.append(len(core.replicas.kept.get(0, ())))
    assert kept[0] == 4 and kept == sorted(kept, reverse=True) and kept[-1] == 1
    assert kept[1] == 3, "one is let go at the end of its chunks"


def resumed(version: int | None, *joined: tuple[str, int]) -> tuple[RolloutCore, list[StartChunk]]:
    """A new coordinator's core at weights 2, with two begun samples and a new one; and the chunks that it starts."""
    core = core_of()
    core.observe(ev.WeightsChanged(0.0, 2))
    for name, holds in joined:
        joins(core, name, holds)
    begun = tuple(ev.Begun(index, 16, False, version) for index in range(2))
    submit(core, ev.GroupSpec("old", 16, 3, 48, begun=begun))
    return core, starts(tick(core))


def test_samples_that_an_earlier_coordinator_has_begun_end_on_the_replicas_that_hold_their_weights():
    core, running = resumed(1, ("a", 1), ("b", 2), ("c", 1), ("d", 0))
    assert {one.sample_id: one.weights_version for one in running} == {"old#0": 1, "old#1": 1, "old#2": 2}
    assert core.replicas.kept == {1: {"a", "c"}}, "nothing of the weights before them is left"
    for one in running:
        ends(core, one)
    assert {one.sample_id: one.weights_version for one in starts(tick(core))} == {"old#0": 1, "old#1": 1, "old#2": 2}
    for one in running[:2]:
        core.observe(ev.SampleCancelled(0.0, one.sample_id))
    core.observe(ev.BatchCancelled(0.0, "b"))
    for chunk_id, chunk in list(core._running.chunks.items()):
        core.observe(ev.ChunkFinished(0.0, chunk_id, 0, ev.ChunkEnd.ABORTED, chunk.weights_version))
    tick(core)
    assert not core.replicas.kept and not core._drain._each


@pytest.mark.parametrize("version", [0, 2, None])
def test_begun_samples_whose_weights_no_replica_holds_continue_under_the_newest(version):
    core, running = resumed(version, ("a", 1), ("b", 2))
    assert {one.weights_version for one in running} == {2} and len(running) == 3 and not core.replicas.kept


def test_a_pause_keeps_the_old_weights():
    core = core_of("a", "b")
    submit(core, ev.GroupSpec("old", 16, 2, 64))
    for one in starts(tick(core)):
        ends(core, one)
    running = starts(tick(core))
    core.observe(ev.WeightsChanged(0.0, 1))
    tick(core)
    for name in "ab":
        joins(core, name, -1)  # as a pause has them
    for one in running:
        ends(core, one, "aborted", 3)
    assert not starts(tick(core))
    (keeper,) = core.replicas.kept[0]
    joins(core, keeper, 0)
    assert {(one.replica_id, one.weights_version) for one in starts(tick(core))} == {(keeper, 0)}


# ---- laws over plays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [15, pytest.param(80, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("ordering", "placement"), [("seer", "least_kv"), ("fcfs", "cost_aware"), ("group_static", "pinned")]
)
def test_no_chunk_runs_under_other_weights_and_all_samples_end(ordering, placement, examples):
    mixed = []

    @seed(0)
    @settings(PROFILE, max_examples=examples)
    @given(data=st.binary(min_size=300, max_size=300))
    def run(data):
        played = play(policies_of(ordering, placement, CHUNKS[data[0] % 3], "finish"), data[1:], operations=TURNS)
        ledger, versions = Ledger(), defaultdict(set)
        for event, actions in played.steps:
            if isinstance(event, ev.ChunkFinished) and event.new_tokens:
                versions[ledger.running[event.chunk_id].sample_id].add(event.weights_version)
            for action in actions:
                if isinstance(action, StartChunk):
                    assert ledger.replicas[action.replica_id].version == action.weights_version
                    assert action.kv_version == action.weights_version
                    assert action.weights_version in (ledger.version, *versions[action.sample_id])
            ledger.note(event, actions)
            for books in ledger.replicas.values():
                assert sum(books.blocks.values()) <= books.join.kv_capacity_blocks
        known = {action.sample_id for action in played.actions(EndSample)}
        assert len(known) == len(played.actions(EndSample)) == len(ledger.specs)
        assert len(played.actions(EmitGroup)) == len(ledger.known)
        core = played.core
        assert core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}
        assert not len(core._waiting) and not core._kv._held
        mixed.append(sum(1 for seen in versions.values() if len(seen) > 1))

    run()
    assert sum(map(bool, mixed)) < len(mixed), (
        "samples mix where their replicas are lost or loaded, and in no other play"
    )


def test_a_group_that_is_bound_anew_leaves_the_queue_of_its_older_weights():
    chunks = {"type": "fixed", "chunk_tokens": 50}
    core = RolloutCore(Policies(ordering="group_static", kv_on_update="finish", chunking=chunks, lanes="none"))
    running: dict[str, StartChunk] = {}

    def turn(now: float) -> None:
        running.update({one.chunk_id: one for one in starts(core.decide(ev.Tick(now)))})

    def end(now: float, chunk_id: str, tokens: int = 50, how: str = "length") -> None:
        start = running.pop(chunk_id)
        made = min(tokens, start.max_tokens)
        core.observe(ev.ChunkFinished(now, chunk_id, made, ev.ChunkEnd(how), start.weights_version))

    for name in ("r0", "r1"):
        joins(core, name, 0, 64, 4)
    submit(core, ev.GroupSpec("H", 10, 2, 1000), ev.GroupSpec("G", 10, 6, 1000))
    turn(0.1)
    core.observe(ev.WeightsChanged(2.0, 1))
    turn(2.0)
    turn(2.1)
    for chunk_id in [one for one, start in running.items() if start.replica_id == "r0"]:
        end(2.2, chunk_id, 10, "aborted")
    turn(2.3)
    joins(core, "r0", 1, 64, 4)
    turn(2.4)
    for chunk_id in [one for one in running if one.startswith("G")][:2]:
        end(2.5, chunk_id)
    turn(2.6)
    assert {sample.place for sample in core._waiting.samples()} >= {0}, "begun ones wait for their weights"
    for chunk_id in [one for one, start in running.items() if start.replica_id == "r1"][:3]:
        running.pop(chunk_id)
        core.observe(ev.ChunkFailed(3.0, chunk_id, "fell over"))
    turn(3.1)
    assert core.replicas.aside("r1") is not None
    for count in range(200):
        for chunk_id in list(running):
            end(3.5 + count, chunk_id)
        turn(3.6 + count)
    assert core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}


@pytest.mark.parametrize("ordering", ["seer", "group_static"])
def test_a_sample_whose_group_waits_for_a_replica_ends_on_the_only_one_under_its_older_weights(ordering):
    """The replica came back with the weights, and they change before the group is bound again."""
    policies = Policies(kv_on_update="finish", ordering=ordering, chunking={"type": "fixed", "chunk_tokens": 16})
    core = RolloutCore(policies)
    joins(core, "a", 0)
    submit(core, ev.GroupSpec("old", 16, 2, 48))
    first, other = starts(tick(core))
    ends(core, first)
    ends(core, other, "stop")
    core.observe(ev.ReplicaLeft(0.0, "a", "gone"))
    joins(core, "a", 0)
    core.observe(ev.WeightsChanged(0.0, 1))
    submit(core, ev.GroupSpec("new", 16, 1, 16), batch_id="c")
    for _ in range(2):
        (running,) = starts(tick(core))
        assert (running.sample_id, running.weights_version) == (first.sample_id, 0)
        ends(core, running)
    tick(core)
    assert not core.replicas.kept
    joins(core, "a", 1)
    (fresh,) = starts(tick(core))
    assert (fresh.sample_id, fresh.weights_version) == ("new#0", 1)


def test_a_batch_that_comes_back_as_the_only_replica_is_to_load_other_weights_ends_under_its_own():
    core = core_of("a")
    core.observe(ev.WeightsChanged(0.0, 1))
    submit(core, ev.GroupSpec("old", 16, 1, 32, begun=(ev.Begun(0, 16, False, 0),)))
    (running,) = starts(tick(core))
    assert (running.replica_id, running.weights_version, running.start) == ("a", 0, 16)
    ends(core, running)
    tick(core)
    assert not core.replicas.kept


def test_samples_that_were_queued_while_their_only_replica_was_set_aside_end_there_under_its_weights():
    """Else they wait for a replica of the newest weights, which that one takes after them."""
    core = core_of("a")
    submit(core, ev.GroupSpec("old", 16, 4, 48))
    for one in starts(tick(core)):
        ends(core, one)
    *failing, last = starts(tick(core))
    for one in failing:
        core.observe(ev.ChunkFailed(0.0, one.chunk_id, "fell over"))
    assert core.replicas.aside("a")
    core.observe(ev.WeightsChanged(0.0, 1))
    ends(core, last)
    assert not starts(core.decide(ev.Tick(1.0))) and core.replicas.keeps("a")
    for now in (60.0, 61.0, 62.0):
        for one in starts(core.decide(ev.Tick(now))):
            assert (one.replica_id, one.weights_version) == ("a", 0)
            ends(core, one)
    assert core.counts()["waiting"] == 0
    core.decide(ev.Tick(63.0))
    assert not core.replicas.kept
