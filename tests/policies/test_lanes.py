"""Lanes: the closed form, the cut and its contract, what the core does with a plan, and the laws over plays."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from performances import measured
from rollout_machine import LANE_PLAYS, LANES, play, policies_of, replay

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.lanes import Cutter, planned_lanes, settled
from tailrace.policies.families.registry import Policies, load_policy, members
from tailrace.policies.models.lane_cost import LaneCost
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, StartChunk
from tailrace.policies.protocol.events import IllegalEvent
from tailrace.policies.protocol.performance import Performance
from tailrace.policies.protocol.views import LaneReplica, LanesView

PROFILE = settings(max_examples=40, derandomize=True, deadline=None, database=None)
BASE_S, TOKEN_S, CONTEXT_S = 0.01, 1e-4, 1e-7
POINTS = tuple(float(1 << power) for power in range(14))
STEPS = Performance(0.0, POINTS, tuple(BASE_S + TOKEN_S * n for n in POINTS), context_token_s=CONTEXT_S)
OWN = {"type": "user_policies:TakingTurns"}


def slower(factor: float) -> Performance:
    return Performance(0.0, POINTS, tuple(factor * (BASE_S + TOKEN_S * n) for n in POINTS), context_token_s=CONTEXT_S)


def replicas(*performances: Performance, kv: int = 10**7, running: int = 512) -> tuple[LaneReplica, ...]:
    return tuple(LaneReplica(kv, running, one) for one in performances)


def view(left, at=None, of=(STEPS,) * 4, high=None, drawn=None, told=1.0, **sizes) -> LanesView:
    left = np.asarray(left, float)
    return LanesView(
        now=0.0,
        left=left,
        left_high=left if high is None else np.asarray(high, float),
        drawn=np.zeros((0, len(left))) if drawn is None else np.asarray(drawn, float),
        context=np.full(len(left), 100),
        replica=np.full(len(left), -1) if at is None else np.asarray(at),
        replicas=replicas(*of, **sizes),
        chance=0.0,
        max_drafts=0,
        told=told,
        reserved_tokens=0.0,
    )


def skewed(count: int, spread: float = 1.0) -> np.ndarray:
    return np.exp(6 + spread * np.random.default_rng(0).standard_normal(count))


# ---- the closed form ---------------------------------------------------------------------------------


def test_seconds_are_those_of_steps_counted_one_by_one():
    """Samples that all run at once: the base for the longest, a token's time for each, context as it grows."""
    cost, left, context = LaneCost(replicas(STEPS), 0.0, 0, 0.0, 100.0), np.array([40.0, 80.0, 400.0, 400.0]), 1_000
    counted = 0.0
    for step in range(400):
        alive = left[left > step]
        counted += BASE_S + TOKEN_S * max(len(alive), 1) + CONTEXT_S * (len(alive) * (context + step))
    held = float((left * (context + left / 2)).sum())
    assert cost.seconds(400.0, float(left.sum()), held, 4) == pytest.approx(counted, rel=0.02)


def test_a_lane_without_room_works_in_waves():
    cost = LaneCost(replicas(STEPS, kv=1_000), 0.0, 0, 0.0, 100.0)
    few, many = cost.seconds(100.0, 500.0, 500.0 * 150, 5), cost.seconds(100.0, 2_000.0, 2_000.0 * 150, 20)
    assert many > 3 * few
    one_place = LaneCost(replicas(STEPS, running=1), 0.0, 0, 0.0, 100.0)
    assert one_place.seconds(100.0, 500.0, 0.0, 5) > 4.9 * one_place.seconds(100.0, 100.0, 0.0, 1)


def test_drafts_shorten_a_lane_of_few_samples_more():
    plain, drafting = (LaneCost(replicas(STEPS), chance, 16, 0.0, 100.0) for chance in (0.0, 0.8))
    few, many = ((100.0 * n, 100.0 * n * 150, n) for n in (1, 512))
    gains = [plain.seconds(100.0, *sizes) / drafting.seconds(100.0, *sizes) for sizes in (few, many)]
    assert gains[0] > 3.0 and gains[0] > gains[1] >= 1.0


@pytest.mark.parametrize("context_token_s", [3e-5, 1e-3])
def test_context_that_seems_dearer_than_whole_steps_ends_no_batch(context_token_s):
    """A few steps that stall by chance while contexts are long measure that; the next batch begins with short ones."""
    stalled = replace(STEPS, context_token_s=context_token_s, context_tokens=16_000.0)
    cost = LaneCost(replicas(stalled), 0.0, 0, 0.0, 100.0)
    seconds = [cost.seconds(100.0, 100.0 * count, 0.0, count) for count in (1, 8, 64, 512)]
    assert seconds[0] > 0.0 and seconds == sorted(seconds)
    core = core_of({"type": "auto", "min_gain": 0.0})
    for name in ("a", "b"):
        core.observe(ev.ReplicaMeasured(0.0, name, stalled))
    core.observe(ev.SamplesSubmitted(0.0, "s", groups()))
    assert len(started(core.decide(ev.Tick(0.0)))) == 32


# ---- the cut -----------------------------------------------------------------------------------------


def test_lanes_end_together_and_few_long_ones_share_the_first():
    plan = planned_lanes(view(skewed(400)), 0.15)
    sizes = np.bincount(plan.replica, minlength=4)
    assert list(sizes) == sorted(sizes) and sizes[0] < 40 and sizes[3] > 160
    left = skewed(400)
    assert min(left[plan.replica == 0]) >= max(left[plan.replica == 3]) * 0.85
    mixed = planned_lanes(view(left, at=np.argsort(np.argsort(-left)) % 4), 0.15)
    assert plan.end_s < 0.9 * mixed.stay_s


def test_what_is_longest_goes_to_the_fastest_replica():
    plan = planned_lanes(view(skewed(100), of=(slower(2.0), STEPS, slower(2.0), slower(2.0))), 0.15)
    assert plan.replica[np.argmax(skewed(100))] == 1


def test_noise_of_measurement_makes_no_replica_faster():
    noisy = tuple(slower(factor) for factor in (1.1, 1.0, 0.95, 1.05))
    assert planned_lanes(view(skewed(100), of=noisy), 0.15).replica[np.argmax(skewed(100))] == 0


def test_a_sample_as_long_as_all_the_rest_is_alone_and_the_rest_is_balanced():
    plan = planned_lanes(view([100_000.0] + [100.0] * 30), 0.15)
    sizes = np.bincount(plan.replica, minlength=4)
    assert sizes[plan.replica[0]] == 1 and set(sizes.tolist()) == {1, 10}


@PROFILE
@given(
    st.lists(st.floats(1.0, 1e5), min_size=1, max_size=60),
    st.lists(st.sampled_from((1.0, 1.5, 3.0)), min_size=1, max_size=9),
    st.randoms(use_true_random=False),
)
def test_every_sample_has_a_replica_and_none_is_left_empty(left, factors, random):
    at = [random.randrange(-1, len(factors)) for _ in left]
    plan = planned_lanes(view(left, at=at, of=tuple(map(slower, factors))), 0.15)
    assert len(plan.replica) == len(left) and plan.replica.min() >= 0 and plan.replica.max() < len(factors)
    sizes = np.bincount(plan.replica, minlength=len(factors))
    assert (sizes > 0).sum() == min(len(left), len(factors))
    assert 0.0 < plan.end_s < float("inf") and plan.stay_s > 0.0


def test_cuts_are_the_earliest_end_within_a_percent():
    """Against every end that a finer search finds."""
    left = np.sort(skewed(60))[::-1]
    cost = LaneCost(replicas(*(STEPS,) * 3), 0.0, 0, 0.0, 100.0)
    cutter = Cutter(cost, left, left, np.full(60, 100), [1.0] * 3)

    def ends(cuts: list[int]) -> float:
        return max(cutter.seconds(n, *lane) for n, lane in enumerate(pairwise(cuts)))

    best = min(ends([0, a, b, 60]) for a in range(1, 59) for b in range(a + 1, 60))
    assert ends(cutter.cuts()) <= 1.01 * best


def test_samples_of_a_bin_stay_where_the_bin_needs_some():
    wanted, bins, place = np.array([0, 0, 1, 1]), np.zeros(4), np.arange(4)
    assert list(settled(wanted, bins, np.array([1, 1, 0, 0]), place)) == [1, 1, 0, 0]
    assert list(settled(wanted, bins, np.array([1, 1, 1, 0]), place)) == [1, 1, 0, 0]
    assert list(settled(wanted, bins, np.array([-1, -1, -1, 1]), place)) == [0, 0, 1, 1]
    assert list(settled(wanted, np.arange(4.0), np.array([1, 1, 0, 0]), place)) == [0, 0, 1, 1]


def test_nearly_equal_samples_do_not_move_as_they_progress():
    left = np.full(64, 1_000.0) + np.arange(64) / 100
    first = planned_lanes(view(left), 0.15)
    again = planned_lanes(view(left[::-1] - 5, at=first.replica), 0.15)
    assert (again.replica == first.replica).all()


def test_a_plan_s_gain_is_of_what_is_told():
    drawn = skewed(400)[None]
    told, half, nothing = (
        planned_lanes(view(np.full(400, 400.0), drawn=drawn, told=t), 0.15).gain for t in (1, 0.5, 0)
    )
    assert told > 0.1 and half == pytest.approx(told / 4) and nothing == 0.0
    assert planned_lanes(view(np.full(400, 400.0), drawn=np.full((1, 400), 400.0)), 0.15).gain < 0.02


@pytest.mark.parametrize("name", [*members("lanes"), OWN["type"]])
def test_every_member_gives_each_sample_a_replica(name):
    policy = load_policy("lanes", name)
    if policy.on:
        plan = policy.plan(view(skewed(20)))
        assert sorted(set(plan.replica.tolist())) == [0, 1, 2, 3] and plan.end_s > 0 and policy.every > 0


# ---- what the core does with them ----------------------------------------------------------------------

LONG = ((100,) * 16, (900,) * 16, (300,) * 16, (320,) * 16)


def core_of(lanes="auto", names=("a", "b"), seen=True, **policies) -> RolloutCore:
    policies = {"chunking": {"type": "fixed", "chunk_tokens": 100}} | policies
    core = RolloutCore(Policies(ordering="remaining_first", lanes=lanes, **policies))
    for name in names:
        core.observe(ev.ReplicaJoined(0.0, name, 16, 10_000, 64, 0, 0))
        core.observe(measured(0.0, name))
    if seen:
        core.observe(ev.LengthsSeen(0.0, tuple(((), answers) for answers in LONG)))
    return core


def groups(samples: int = 8, history: bool = True) -> tuple[ev.GroupSpec, ...]:
    return tuple(
        ev.GroupSpec(f"g{n}", 50, samples, 1_000, (answers,) if history else ()) for n, answers in enumerate(LONG)
    )


def started(actions) -> dict[str, str]:
    return {a.sample_id: a.replica_id for a in actions if isinstance(a, StartChunk)}


def test_history_puts_the_long_prompt_apart_from_the_first_chunk_on():
    core = core_of({"type": "auto", "min_gain": 0.0})
    core.observe(ev.SamplesSubmitted(0.0, "s", groups()))
    actions = core.decide(ev.Tick(0.0))
    at = started(actions)
    assert len(at) == 32 and {at[f"g0#{n}"] for n in range(8)} == {"b"} and {at[f"g1#{n}"] for n in range(8)} == {"a"}
    assert all("its lane is to end at" in a.reason for a in actions)


def test_nothing_is_planned_where_nothing_tells():
    for core, specs in (
        (core_of(seen=False), groups(history=False)),
        (core_of(), groups(samples=1, history=False)),
        (core_of("none"), groups()),
        (core_of(names=("a",)), groups()),
        (core_of(placement="pinned"), groups()),
    ):
        core.observe(ev.SamplesSubmitted(0.0, "s", specs))
        assert not [a for a in core.decide(ev.Tick(0.0)) if "lane" in a.reason]


def test_a_prediction_tells_as_far_as_it_is_good():
    """The same numbers: of quality 0.99 they are followed, of 0.5 they change nothing."""
    seen = tuple(((), ((3_000 if n == 15 else 80 + 2 * n),) * 8) for n in range(16))
    for quality, followed in ((0.99, True), (0.5, False)):
        core = core_of({"type": "auto", "min_gain": 0.005}, seen=False)
        core.observe(ev.LengthsSeen(0.0, seen))
        specs = [
            ev.GroupSpec(f"g{n}", 50, 1, 4_000, prediction=ev.Prediction(9.0 * (n == 7) + n / 100, quality))
            for n in range(16)
        ]
        core.observe(ev.SamplesSubmitted(0.0, "s", tuple(specs)))
        actions = core.decide(ev.Tick(0.0))
        assert any("lane" in a.reason for a in actions) == followed
        if followed:
            at = started(actions)
            assert [sample_id for sample_id, replica in at.items() if replica == at["g7#0"]] == ["g7#0"]


@pytest.mark.parametrize(
    "prediction", [ev.Prediction(1.0, 1.5), ev.Prediction(1.0, -0.1), ev.Prediction(float("nan"), 0.5)]
)
def test_an_impossible_prediction_is_refused(prediction):
    with pytest.raises(IllegalEvent, match="give a number, and a quality of 0 to 1"):
        core_of().observe(ev.SamplesSubmitted(0.0, "s", (ev.GroupSpec("g", 1, 1, 10, prediction=prediction),)))


def test_the_lengths_of_a_batch_are_the_law_of_the_next():
    core = core_of({"type": "auto", "min_gain": 0.0}, seen=False, chunking={"type": "fixed", "chunk_tokens": None})
    for step, laned in enumerate((False, True)):
        core.observe(ev.SamplesSubmitted(float(step), f"s{step}", groups(history=False)))
        actions = core.decide(ev.Tick(float(step)))
        assert any("lane" in a.reason for a in actions) == laned
        for number, action in enumerate(actions):
            if isinstance(action, StartChunk):
                end = (action.chunk_id, 100 + 17 * number, ev.ChunkEnd.STOP, 0)
                core.observe(ev.ChunkFinished(step + 0.5, *end))
        core.decide(ev.Tick(step + 0.5))


def test_two_batches_at_once_have_no_lanes():
    core = core_of({"type": "auto", "min_gain": 0.0}, names=("a", "b"))
    core.observe(ev.SamplesSubmitted(0.0, "s", groups()))
    core.decide(ev.Tick(0.0))
    assert any(sample.home for sample in core.samples())
    core.observe(ev.SamplesSubmitted(1.0, "t", (ev.GroupSpec("x", 50, 2, 100),)))
    assert all("lane" not in a.reason for a in core.decide(ev.Tick(1.0)))
    assert not any(sample.home for sample in core.samples())


def test_a_batch_to_which_groups_came_later_has_no_lanes_also_once_it_is_closed():
    core = core_of({"type": "auto", "min_gain": 0.0})
    core.observe(ev.SamplesSubmitted(0.0, "s", groups()[:2], open=True))
    actions = core.decide(ev.Tick(0.0))
    core.observe(ev.SamplesSubmitted(1.0, "s", groups()[2:]))
    actions += core.decide(ev.Tick(1.0))
    assert len(started(actions)) == 32 and not any("lane" in a.reason for a in actions)


def test_a_lost_replica_s_samples_get_lanes_on_the_others():
    core = core_of({"type": "auto", "min_gain": 0.0}, names=("a", "b", "c"))
    core.observe(ev.SamplesSubmitted(0.0, "s", groups()))
    lost = [i for i, replica in started(core.decide(ev.Tick(0.0))).items() if replica == "a"]
    core.observe(ev.ReplicaLeft(1.0, "a", "node gone"))
    again = started(core.decide(ev.Tick(1.0)))
    assert lost and set(again) == set(lost) and {sample.home for sample in core.samples()} == {"b", "c"}


def test_lanes_of_a_replica_that_does_not_load_new_weights_go_to_the_only_other_one():
    """It may be about to load them, so its samples wait for it at first."""
    core = core_of({"type": "auto", "min_gain": 0.0})
    core.observe(ev.SamplesSubmitted(0.0, "s", groups()))
    before = core.decide(ev.Tick(0.0))
    core.observe(ev.WeightsChanged(1.0, 1))
    core.decide(ev.Tick(1.0))
    for action in before:
        core.observe(ev.ChunkFinished(1.1, action.chunk_id, 5, ev.ChunkEnd.ABORTED, 0))
    core.observe(ev.ReplicaJoined(1.2, "a", 16, 10_000, 64, 0, 1))
    own, later = started(core.decide(ev.Tick(1.5))), started(core.decide(ev.Tick(8.0)))
    rest = started(core.decide(ev.Tick(12.0)))
    assert 0 < len(own) < 32 and not later and len(own) + len(rest) == 32
    core.observe(ev.ReplicaJoined(12.1, "b", 16, 10_000, 64, 0, 1))
    core.decide(ev.Tick(12.5))
    assert {sample.home for sample in core.samples()} == {"a", "b"}


def test_a_running_sample_moves_at_once_only_if_that_gains_more_than_the_move():
    for fetch, moves in ((1e6, True), (0.0, False)):
        core = core_of("clairvoyant", seen=False)
        for name in ("a", "b"):
            core.observe(measured(0.5, name, 1e6 if fetch else 1e4, fetch, 0.0, at=0.5))  # 0.01 or 0.5 s; it gains 0.1
        specs = tuple(ev.GroupSpec(f"g{n}", 5_000, 1, 4_000, chunk_tokens=4_000) for n in range(8))
        core.observe(ev.LengthsRevealed(1.0, {f"g{n}#0": 3_000 if n < 4 else 100 for n in range(8)}))
        core.observe(ev.SamplesSubmitted(1.0, "s", specs))
        assert len(started(core.decide(ev.Tick(1.0)))) == 8
        core.observe(ev.ReplicaJoined(2.0, "c", 16, 10_000, 64, 0, 0))
        core.observe(measured(2.0, "c"))
        stopped = [a for a in core.decide(ev.Tick(2.0)) if isinstance(a, AbortChunk)]
        assert bool(stopped) == moves and all("its lane is on" in a.reason and a.keep_kv for a in stopped)


def test_true_lengths_are_refused_by_lanes_that_believe_and_needed_by_those_that_know():
    with pytest.raises(IllegalEvent, match="must not see true lengths"):
        core_of().observe(ev.LengthsRevealed(0.0, {"g0#0": 1}))
    with pytest.raises(IllegalEvent, match="lanes clairvoyant needs true lengths"):
        core_of("clairvoyant").observe(ev.SamplesSubmitted(0.0, "s", groups()))


# ---- the laws ------------------------------------------------------------------------------------------


@pytest.mark.slow
@seed(0)
@settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate])
@given(data=st.binary(min_size=260, max_size=260))
@pytest.mark.parametrize("lanes", [*LANES[1:], OWN], ids=["auto", "clairvoyant", "own"])
def test_the_laws_hold_over_plays_with_lanes(lanes, data):
    """Plays of few batches on measured replicas, so that lanes are in force most of the time."""
    for placement, chunk_tokens in (("least_kv", 13), ("cost_aware", 200)):
        played = play(policies_of("remaining_first", placement, chunk_tokens, lanes=lanes), data, operations=LANE_PLAYS)
        assert not (played.starved or played.idle or played.stale or played.closed or played.changed)
        assert played.core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}
        assert not (played.core._lanes._truth or played.core._lanes._levels or played.core._lanes._batch)
        assert repr(replay(played.core.policies, played.steps)) == repr([actions for _, actions in played.steps])
