"""How draft models draft, by policy: the contract every one keeps, what the planner says, and how the core obeys."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import measured, performance
from rollout_machine import play

from tailrace.deployments.coordinator.journal import JournaledCore, read_journal, replay
from tailrace.policies.core.draft_planner import doubling, fewest
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.draft_models import (
    AsConfigured,
    DrafterStep,
    Planned,
    measured_drafter,
    measured_verifier,
)
from tailrace.policies.families.registry import Policies, load_policy, members
from tailrace.policies.models.spec_cost_model import DrafterCost, VerifierCost
from tailrace.policies.models.specactor_planner import Decoupled
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import DraftMode, SetReplicas, StartChunk
from tailrace.policies.protocol.performance import MethodAcceptance
from tailrace.policies.protocol.views import DraftModelsView

PROFILE = settings(max_examples=40, derandomize=True, deadline=None, database=None)
EVERY = [*members("draft_models"), "user_policies:AlwaysTwo"]
FAST = {"type": "planned", "acceptance": 0.8, "drafter": {"base_s": 0.002}, "verifier": {"base_s": 0.02}}
"""A drafter ten times as fast as its verifier."""

DRAFTER = {"drafter_samples": (1.0, 9.0), "drafter_seconds": (0.03, 0.11)}
PERFORMANCES = (None, performance(), performance(**DRAFTER), performance(base=0.0, chunk=0.0, **DRAFTER))


# ---- the contract ----------------------------------------------------------------------------------


@PROFILE
@given(
    view=st.builds(
        DraftModelsView, st.integers(0, 300), st.integers(0, 600), st.floats(0, 1), st.sampled_from(PERFORMANCES)
    ),
    acceptance=st.floats(0, 1),
)
@pytest.mark.parametrize("name", EVERY)
def test_every_member_repeats_itself_and_says_what_can_be(name, view, acceptance):
    policy = load_policy("draft_models", name)
    way, why = policy.way(view, acceptance)
    assert (way, why) == policy.way(view, acceptance) and "\n" not in why
    assert way is None or (way.window >= 0 and why)
    assert policy.gain(view) == policy.gain(view) >= 1.0
    assert 0 <= policy.acceptance <= 1 and policy.replicas >= 0


def laws_hold(tail, name, data, limits):
    knobs = {"chunking": {"type": "fixed", "chunk_tokens": 13}, "tail": tail if limits else "hold"}
    played = play(Policies(draft_models=load_policy("draft_models", name), **knobs), data, limits)
    assert not (played.starved or played.changed or played.stale or played.evicted or played.closed)
    starts = [start for start in played.actions(StartChunk) if start.copy_of is None]
    assert all((start.way is None) == (name == "as_configured") for start in starts)


PLAYS = given(data=st.binary(min_size=60, max_size=400), limits=st.sampled_from((None, Limits(1, 4))))
TAILS = ["hold", "draft", "auto"]


@pytest.mark.slow
@settings(PROFILE, max_examples=12)
@PLAYS
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("tail", TAILS)
def test_the_laws_hold_whatever_drafts(tail, name, data, limits):
    laws_hold(tail, name, data, limits)


@pytest.mark.long
@settings(PROFILE, max_examples=100)
@PLAYS
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("tail", TAILS)
def test_the_laws_hold_whatever_drafts_at_length(tail, name, data, limits):
    laws_hold(tail, name, data, limits)


# ---- what the planner says ---------------------------------------------------------------------------


def test_nothing_is_planned_unless_that_is_asked_for():
    assert AsConfigured().way(DraftModelsView(1, 1, 0.9), 0.9) == (None, "")
    assert AsConfigured().gain(DraftModelsView(1, 1, 0.9)) == 1.0


def test_all_get_algorithm_1s_window_and_whoever_accepts_less_than_the_mean_algorithm_2s():
    policy, view = Planned(**FAST), DraftModelsView(8, 8, 0.8)
    planner, drafter, verifier = (
        Decoupled(max_window=8),
        DrafterCost(1, 2e-6, 0.002),
        VerifierCost(1, 1e-5, 2e-5, 0.02),
    )
    plan = planner.best(8, 0.8, drafter, verifier)
    assert plan.drafter and policy.gain(view) == plan.tokens_s * verifier.seconds(8, 0) > 1.5
    for acceptance in (0.8, 0.9):
        assert policy.way(view, acceptance)[0] == DraftMode(plan.window, False)
    better = planner.reconfigure({"bad": 0.2, "good": 0.95, "better": 0.95}, plan)["bad"]
    assert policy.way(view, 0.2) == (
        DraftMode(better.window, better.coupled), f"drafts {better.window}, {better.reason}",
    )  # fmt: skip


def test_figures_in_the_configuration_replace_what_is_measured():
    known = performance(base=0.02, chunk=0.0, **DRAFTER)
    view = DraftModelsView(8, 8, 0.8, known)
    assert Planned(acceptance=0.8).way(view, 0.9)[0].window == 0, "by the measured draft model none pays"
    assert Planned(**FAST).way(view, 0.9) == Planned(**FAST).way(view._replace(performance=None), 0.9)
    fast = performance(base=0.02, chunk=0.0, drafter_samples=(1.0, 9.0), drafter_seconds=(0.002, 0.002))
    assert Planned().way(DraftModelsView(8, 8, 0.8, fast), 0.9)[0].window > 0


def test_measured_costs_are_those_of_the_batch_to_plan_for():
    known = performance(base=0.02, chunk=0.004)
    step = measured_verifier(known, 8, 4)
    assert step.base_s + 8 * (step.sample_s + step.token_s) == pytest.approx(known.verify_s(8, 8), rel=0.1)
    assert step.base_s + 8 * (step.sample_s + 5 * step.token_s) == pytest.approx(known.verify_s(8, 40), rel=0.1)
    assert measured_drafter(performance(**DRAFTER), 8) == DrafterStep(base_s=0.02, sample_s=0.01)
    assert measured_drafter(known, 8) is None and measured_verifier(None, 8, 4) is None


def test_where_no_draft_model_pays_nobody_is_drafted_for():
    slow = Planned(**FAST | {"drafter": {"base_s": 0.03}})
    for policy, p in ((slow, 0.9), (Planned(**FAST), 0.0)):
        way, why = policy.way(DraftModelsView(8, 8, p), 0.9)
        assert way.window == 0 and "no draft model pays" in why
        assert policy.gain(DraftModelsView(8, 8, p)) == pytest.approx(1.0)


def test_a_drafter_that_serves_more_samples_is_slower():
    policy = Planned(**FAST | {"drafter": {"base_s": 0.002, "sample_s": 0.001}})
    gains = [policy.gain(DraftModelsView(8, drafted, 0.8)) for drafted in (1, 8, 64)]
    assert gains == sorted(gains, reverse=True) and gains[0] > gains[-1]


def test_ways_to_use_replicas_are_the_fewest_for_each_pace():
    assert fewest(10, 1, 8) == [1, 2, 3, 4, 5] and fewest(10, 6, 8) == [6] and fewest(3, 1, 0) == []
    assert doubling(6) == [1, 2, 4, 6] and doubling(1) == [1] and doubling(0) == []


# ---- how the core obeys ------------------------------------------------------------------------------


def core_of(samples=4, limits=None, replicas=2, **policies) -> tuple[JournaledCore, list]:
    chunking = {"type": "fixed", "chunk_tokens": 100}
    core = JournaledCore(Policies(chunking=chunking, **{"draft_models": FAST} | policies), limits=limits)
    for index in range(replicas):
        core.observe(ev.ReplicaJoined(0.0, f"r{index}", 16, 1_000, 4, 0, 0, "n", ("model", "group")))
        core.observe(measured(0.0, f"r{index}", 1_000.0, 10_000.0, 0.01, 0.02, 0.0, 0.0))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, samples, 1_000),)))
    return core, core.decide(ev.Tick(0.0))


def starts(actions) -> dict[str, StartChunk]:
    return {action.sample_id: action for action in actions if isinstance(action, StartChunk)}


def goes_on(core: JournaledCore, start: StartChunk, tested: int, accepted: int, now: float) -> StartChunk:
    """The sample's next chunk, after one of which a draft model's drafts went so."""
    drafts = 0, 0, 0, tested, accepted
    core.observe(ev.ChunkFinished(now, start.chunk_id, start.max_tokens, ev.ChunkEnd.LENGTH, 0, *drafts))
    return starts(core.decide(ev.Tick(now)))[start.sample_id]


def test_a_sample_s_own_acceptance_says_how_its_next_chunk_is_drafted():
    core, actions = core_of()
    first = starts(actions)
    assert len({start.way for start in first.values()}) == 1 and first["g#0"].way.window > 0
    assert "accepts 0.80" in first["g#0"].reason
    good = goes_on(core, first["g#0"], 100, 100, 1.0)
    bad = goes_on(core, first["g#1"], 100, 3, 2.0)
    assert not good.way.coupled and good.way.window >= first["g#0"].way.window
    assert bad.way != good.way and "coupled" in bad.reason
    unseen = goes_on(core, first["g#2"], 0, 0, 3.0)
    assert not unseen.way.coupled, "it is taken for an average one"


def test_what_replicas_have_measured_replaces_the_configured_mean():
    core, actions = core_of()
    for name, right, tested in (("r0", 400.0, 4_000.0), ("r1", 0.0, 5_992.0), ("r0", 0.0, 4_000.0)):
        core.observe(measured(0.5, name, acceptance=(MethodAcceptance("model", right, tested),)))
    last = goes_on(core, starts(actions)["g#0"], 0, 0, 1.0)
    assert last.way.window == 0 and "no draft model pays" in last.reason
    assert core.replicas.chance("model", 0.8) == pytest.approx(8 * 0.8 / 10_000), "the last report of each"
    core.observe(ev.ReplicaLeft(2.0, "r1", "gone"))
    assert core.replicas.chance("model", 0.8) == pytest.approx(8 * 0.8 / 4_008)
    assert core.replicas.chance("group", 0.3) == pytest.approx(0.3)


def test_drafts_of_a_race_count_for_its_sample_and_copies_draft_as_configured():
    core, actions = core_of(samples=1, racing={"type": "fastest_of_n"})
    copies = [one for one in actions if isinstance(one, StartChunk) and one.copy_of]
    assert copies and all(copy.way is None for copy in copies)
    ended = ev.ChunkFinished(1.0, copies[0].chunk_id, 100, ev.ChunkEnd.LENGTH, 0, 0, 0, 0, 50, 10)
    core.observe(ended)
    assert (core._buffer.samples["g#0"].model_tested, core._buffer.samples["g#0"].model_accepted) == (50, 10)


@pytest.mark.parametrize(("tested", "accepted"), [(-1, 0), (3, 4), (3, -1)])
def test_more_than_was_tested_cannot_have_been_right(tested, accepted):
    core, _ = core_of()
    with pytest.raises(ev.IllegalEvent, match="of a model"):
        core.observe(ev.ChunkFinished(1.0, "g#0:0", 100, ev.ChunkEnd.LENGTH, 0, 0, 0, 0, tested, accepted))


def test_a_recorded_run_is_answered_alike():
    core, actions = core_of(limits=Limits(1, 2), tail={"type": "auto", "after_s": 0.0})
    for index, start in enumerate(starts(actions).values()):
        goes_on(core, start, 60, 20 * index, 1.0 + index)
    assert replay(read_journal(core.journal().splitlines())) is None


def drafters(worth: float = 1.0, **policies) -> tuple[int, int]:
    """Engines and drafters that there are to be, once one of four samples is left."""
    tail = {"type": "auto", "after_s": 0.0, "worth": worth}
    core, actions = core_of(limits=Limits(1, 2), tail=tail, **policies)
    running = starts(actions)
    assert [(a.replicas, a.drafters) for a in actions if isinstance(a, SetReplicas)] == [(2, 0)], "all has just come"
    for start in [one for one in running.values() if one.sample_id != "g#0"]:
        core.observe(ev.ChunkFinished(1.0, start.chunk_id, 50, ev.ChunkEnd.STOP, 0))
    core.decide(ev.Tick(1.0))
    if core.is_running("g#0:0") and running["g#0"].replica_id == "r1":  # it moves from where nobody stays
        core.observe(ev.ChunkFinished(1.5, "g#0:0", 10, ev.ChunkEnd.ABORTED, 0, 20))
    core.decide(ev.Tick(2.0))
    return core._scaling._asked


def test_auto_has_a_draft_model_run_where_that_pays_and_none_where_it_does_not():
    assert drafters() == (1, 1)
    assert drafters(draft_models=FAST | {"acceptance": 0.1}) == (1, 0)
    assert drafters(draft_models=FAST | {"drafter": {"base_s": 0.03}}) == (1, 0)
    doubtful = FAST | {"acceptance": 0.6}
    assert drafters(draft_models=doubtful) == (1, 1)
    assert drafters(draft_models=doubtful, worth=100.0) == (1, 0), "not twice as fast, on twice as many"
    assert drafters(draft_models="as_configured") == (1, 0)
