"""Trajectories: admission by KV, KV kept between turns, suspension, branches; and the laws over random plays."""

from collections import Counter
from math import inf

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from kv_ledger import new_samples
from performances import performance
from rollout_machine import TURNS, play, replay
from test_kv_cases import of, stored
from test_rollout_cases import join, submit, tick

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.families.trajectories import ByKv
from tailrace.policies.models.gap_belief import PRIOR_S, GapBelief
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EndSample, ReleaseCause, ReleaseKv, StartChunk
from tailrace.policies.protocol.views import TrajectoryLoad

BY_KV = {"type": "by_kv", "full_share": 1.0, "growth_share": 0.0}


def core_of(policy: dict = BY_KV, ordering: str = "fcfs", **replicas) -> RolloutCore:
    placement = {"type": "cost_aware", "pull_from_tokens": 1}
    core = RolloutCore(Policies(ordering=ordering, placement=placement, trajectories=policy))
    for replica_id, blocks in replicas.items():
        core.observe(join(replica_id, blocks))
        core.observe(ev.ReplicaMeasured(0.0, replica_id, performance(chunk=0.01)))
    return core


def spec(name: str, prompt_tokens: int = 64, follows: str | None = None) -> ev.GroupSpec:
    return ev.GroupSpec(name, prompt_tokens, 1, 16, hold_s=600.0, follows=follows)


def run_turn(core: RolloutCore, name: str, kv_tokens: int = 0) -> None:
    """Submits a trajectory, and runs its first turn of 16 tokens."""
    submit(core, spec(name), batch_id=name)
    (start,) = of(StartChunk, tick(core))
    stored(core, start, kv_tokens, end="stop")
    tick(core)


@pytest.mark.parametrize("changes", [{"full_share": 0.3}, {"full_share": 0.6, "growth_share": 0.5}, {"keep_from_s": 0}])
@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.long)])
def test_the_laws_hold_over_random_plays_of_turns(changes, examples):
    policies = Policies(ordering="seer", placement="cost_aware", trajectories={"type": "by_kv"} | changes)

    @seed(1)
    @settings(max_examples=examples, deadline=None, database=None)
    @given(data=st.binary(min_size=250, max_size=250))
    def run(data):
        played = play(policies, data, operations=TURNS)
        core, known = played.core, {}
        for event, _ in played.steps:
            if isinstance(event, ev.SamplesSubmitted):
                list(new_samples(event, known))
        ends = Counter(action.sample_id for action in played.actions(EndSample))
        assert sum(known.values()) == len(ends) and set(ends.values()) <= {1}, "each sample ends once"
        assert not (played.starved or played.changed or played.stale or played.closed)
        assert core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}
        book = core._trajectories
        assert not (book._active or book._parked or book._pauses or book._suspended or book._tokens)
        assert all(view.kv_free_tokens == view.kv_capacity_tokens for view in core.replicas.views())
        assert replay(policies, played.steps) == [actions for _, actions in played.steps], "law 4"

    run()


def test_a_trajectory_begins_once_its_context_fits_and_the_first_one_always_does():
    core = core_of(r=20)  # 320 tokens
    submit(core, spec("a", 200), batch_id="a")
    submit(core, spec("b", 200), spec("c", 10), batch_id="b")
    assert [start.sample_id for start in of(StartChunk, tick(core))] == ["a#0"], "c is behind b"
    assert core.awaited.by(core.sample("b#0")) == "KV of trajectories that began before"
    core.observe(ev.SampleCancelled(0.0, "a#0"))
    core.observe(ev.ChunkFinished(0.0, "a#0:0", 16, ev.ChunkEnd.STOP, 0))
    assert [start.sample_id for start in of(StartChunk, tick(core))] == ["b#0", "c#0"]


def test_without_a_policy_all_begin_at_once():
    core = core_of("all_at_once", r=20)
    submit(core, spec("a", 150), spec("b", 100), batch_id="a")
    assert len(of(StartChunk, tick(core))) == 2


def test_the_pool_counts_where_it_holds_more_than_the_replicas():
    core = core_of(r=20)
    core.observe(ev.PoolReported(0.0, 1_000, 0, 0.0))
    for name in "abcd":
        submit(core, spec(name, 250), batch_id=name)
    tick(core)
    assert sum(core._trajectories.is_parked(core.sample(f"{name}#0")) for name in "abcd") == 0


def test_kv_that_only_the_replica_has_is_kept_until_another_sample_waits():
    core = core_of(BY_KV | {"full_share": 0.9, "keep_from_s": 0.01}, r=20)
    core.observe(ev.PoolReported(0.0, 10_000, 0, 0.0))
    run_turn(core, "a")
    assert core.replicas.view("r").kv_free_tokens == 320 - 80
    submit(core, spec("b", 280), batch_id="b")
    assert [start.sample_id for start in of(StartChunk, tick(core))] == ["b#0"]
    core.observe(ev.SampleReturned(1.0, "a#0", 8, 16, 600.0))
    assert not of(StartChunk, tick(core, 1.0))


def test_kv_that_the_pool_brings_back_at_once_is_not_kept():
    core = core_of(r=20)
    core.observe(ev.ReplicaMeasured(1.0, "r", performance(100.0, 20_000.0, at=1.0)))
    run_turn(core, "a", kv_tokens=80)
    assert core.replicas.view("r").kv_free_tokens == 320


def test_contexts_that_outgrow_the_kv_suspend_the_newest_trajectory():
    core = core_of(BY_KV | {"give_up_from": 1e9}, r=20)
    run_turn(core, "a", 80)
    run_turn(core, "b", 80)
    core.observe(ev.SampleReturned(1.0, "a#0", 150, 16, 600.0))
    (start,) = of(StartChunk, tick(core, 1.0))
    stored(core, start, 246, end="stop")
    actions = tick(core, 2.0)
    released = [(a.group_id, a.sample_id) for a in of(ReleaseKv, actions) if a.cause is ReleaseCause.SUSPENDED]
    assert released == [("b", "b#0"), ("b", None)], "and its prompt's"
    core.observe(ev.SampleReturned(3.0, "b#0", 8, 16, 600.0))
    assert not of(StartChunk, tick(core, 3.0)), "a has what b needs"
    core.observe(ev.SampleCancelled(4.0, "a#0"))
    assert [start.sample_id for start in of(StartChunk, tick(core, 4.0))] == ["b#0"]


def test_a_branch_takes_the_place_and_the_replica_of_the_sample_that_it_follows():
    core = core_of(r=20, s=42)
    for replica_id in "rs":
        core.observe(ev.ReplicaMeasured(1.0, replica_id, performance(1.0, 0.0, at=1.0)))
    run_turn(core, "a")
    replica_id = core.sample("a#0").last_replica
    submit(core, spec("big", 500), batch_id="big")
    tick(core)
    submit(core, spec("next", 600), spec("branch", 70, follows="a#0"), batch_id="b")
    (start,) = [s for s in of(StartChunk, tick(core)) if s.sample_id == "branch#0"]
    assert start.replica_id == replica_id and core._trajectories.is_parked(core.sample("next#0"))
    submit(core, spec("late", 16, follows="nobody#0"), batch_id="late")
    assert core.sample("late#0") is not None


def test_changed_weights_and_lost_replicas_keep_no_kv():
    core = core_of(r=20, s=20)
    run_turn(core, "a")
    core.observe(ev.WeightsChanged(1.0, 1))
    assert {view.kv_free_tokens for view in core.replicas.views()} == {320}
    run = core_of(r=20)
    run_turn(run, "a")
    run.observe(ev.ReplicaLeft(1.0, "r", "gone"))
    run.observe(join("r", 20))
    assert run.replicas.view("r").kv_free_tokens == 320


def test_a_trajectory_that_waits_to_begin_outlives_the_replica_that_its_group_is_bound_to():
    core = core_of({"type": "by_kv", "full_share": 1e-6}, "group_static", r=20, s=20)
    run_turn(core, "a")
    submit(core, spec("b"), batch_id="b")
    assert of(StartChunk, tick(core)) == [] and core._trajectories.is_parked(core.sample("b#0"))
    bound = core.sample("b#0").home
    core.observe(ev.ReplicaLeft(1.0, bound, "gone"))
    core.observe(ev.SampleCancelled(1.0, "a#0"))
    (start,) = of(StartChunk, tick(core))
    assert start.sample_id == "b#0" and start.replica_id != bound is not None


def test_by_kv_holds_a_share_of_the_expected_growth_free():
    policy = ByKv(full_share=0.9, growth_share=0.5)
    load = TrajectoryLoad(active=2, context_tokens=300, growth_tokens=100.0, capacity_tokens=1_000)
    assert policy.fits(load, 450) and not policy.fits(load, 451)
    assert policy.is_overfull(load._replace(context_tokens=901)) and not policy.is_overfull(load)
    assert policy.keeps(5.0, 1.0, waits=False) and not policy.keeps(5.0, 1.0, waits=True)


def test_gaps_are_learnt_from_the_trajectory_itself_from_the_tool_and_from_all():
    gaps = GapBelief()
    assert gaps.left_s("a", "") == PRIOR_S == gaps.price_s("a", "", 0.0)
    for _ in range(20):
        gaps.learn("a", "grep", 2.0)
        gaps.learn("b", "build", 100.0)
    assert gaps.left_s("a", "grep") < 6 and gaps.left_s("b", "build") > 80
    assert gaps.left_s("c", "grep") < gaps.left_s("c", "") < gaps.left_s("c", "build")
    gaps.follow("c", of="a")
    assert gaps.left_s("c", "grep") == gaps.left_s("a", "grep")
    gaps.forget("a")
    assert gaps.left_s("a", "grep") > gaps.left_s("c", "grep")
    assert gaps.left_s("a", "grep", 5.0) > 50, "not the tool's usual gap"
    assert gaps.left_s("a", "grep", 1e6) == gaps.price_s("a", "grep", 1e6) == 1e6, "as long again"


def test_a_few_long_gaps_do_not_raise_the_price_of_waiting_for_short_ones():
    gaps = GapBelief()
    for _ in range(19):
        gaps.learn("a", "", 4.0)
    gaps.learn("a", "", 36_000.0)
    assert gaps.left_s("a", "") > 1_000 and gaps.price_s("a", "", 0.0) < 6
    assert gaps.price_s("a", "", 600.0) > 30_000, "only the long one is left"


def test_a_pause_that_is_expected_to_be_long_gives_its_kv_to_a_trajectory_that_waits():
    policy = BY_KV | {"give_up_from": 1.0}
    for tool, given_up in (("quick", False), ("slow", True)):
        core = core_of(policy, r=20)
        core.observe(ev.ReplicaMeasured(1.0, "r", performance(10.0, 0.0, at=1.0)))
        for number in range(8):  # gaps of a second and of 1,000 s are learnt
            name, gap_s, called = f"{number}", (1.0, 1_000.0)[number % 2], ("quick", "slow")[number % 2]
            submit(core, spec(name, 16), batch_id=name)
            (start,) = of(StartChunk, tick(core))
            stored(core, start, 16, end="stop")
            tick(core)
            core.observe(ev.ToolCalled(0.0, f"{name}#0", called))
            core.observe(ev.SampleReturned(gap_s, f"{name}#0", 1, 16, 0.0))
            (start,) = of(StartChunk, tick(core, gap_s))
            stored(core, start, 16, end="stop")
            tick(core)
        run_turn(core, "a", 80)
        core.observe(ev.ToolCalled(0.0, "a#0", tool))
        submit(core, spec("b", 250), batch_id="b")
        assert not of(StartChunk, tick(core, 0.5))
        actions = tick(core, 0.5)
        suspended = [a.sample_id for a in of(ReleaseKv, actions) if a.cause is ReleaseCause.SUSPENDED and a.sample_id]
        assert suspended == ["a#0"] * given_up
        assert [one.sample_id for one in of(StartChunk, actions)] == ["b#0"] * given_up


def test_without_seconds_a_sample_is_held_by_the_gaps_that_were_seen():
    for policy, ends in (({"type": "all_at_once", "hold_gaps": 3.0}, True), (BY_KV, False)):
        core = core_of(policy, r=20)
        submit(core, ev.GroupSpec("a", 64, 1, 16, hold_s=inf), batch_id="a")
        (start,) = of(StartChunk, tick(core))
        stored(core, start, 80, end="stop")
        assert not of(EndSample, tick(core, 3 * PRIOR_S - 1))
        assert bool(of(EndSample, tick(core, 3 * PRIOR_S + 1))) == ends


@pytest.mark.parametrize("hold_s", [30.0, inf])
def test_a_tool_call_that_leaves_the_deadline_as_it_is_ends_the_sample_once(hold_s):
    core = RolloutCore(Policies())
    core.observe(join("a", 1000))
    held = ev.GroupSpec("g", 10, 1, 100, hold_s=hold_s, open=True)
    core.observe(ev.SamplesSubmitted(0.0, "b", (held,), open=True))
    (start,) = of(StartChunk, tick(core, 0.1))
    core.observe(ev.ChunkFinished(1.0, start.chunk_id, 5, ev.ChunkEnd.STOP, 0))
    tick(core, 1.0)
    core.observe(ev.ToolCalled(1.1, "g#0", "bash"))
    ended = [of(EndSample, tick(core, now)) for now in (20.0, 2000.0, 2001.0)]
    assert list(map(len, ended)) == [0, 1, 0]


def test_a_bound_sample_starts_once_kept_kv_has_left_its_replica():
    policies = {"ordering": "fcfs", "placement": "pinned", "lanes": "none"}
    core = RolloutCore(Policies(**policies, trajectories="by_kv", chunking={"type": "fixed", "chunk_tokens": None}))
    for name in ("a", "b"):
        core.observe(join(name, 64))
    for name, prompt, most, hold_s in (("held", 10, 500, 30.0), ("other", 10, 900, 0.0)):
        core.observe(ev.SamplesSubmitted(0.0, name, (ev.GroupSpec(name, prompt, 1, most, hold_s=hold_s),)))
        tick(core, 0.1)
    core.observe(ev.SamplesSubmitted(0.0, "bound", (ev.GroupSpec("bound", 10, 1, 900, chunk_tokens=50),)))
    (start,) = of(StartChunk, tick(core, 0.2))
    core.observe(ev.ChunkFinished(1.0, "held#0:0", 490, ev.ChunkEnd.STOP, 0))
    now = 1.0
    while start is not None:
        now += 0.1
        core.observe(ev.ChunkFinished(now, start.chunk_id, 50, ev.ChunkEnd.LENGTH, 0))
        start = next(iter(of(StartChunk, tick(core, now))), None)
    assert core.sample("bound#0").home == "a" and not core.replicas.view("a").running
    assert [one.sample_id for one in of(StartChunk, tick(core, 40.0))] == ["bound#0"]
