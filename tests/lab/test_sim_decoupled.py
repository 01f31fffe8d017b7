"""Draft models on simulated replicas: rounds against the rates that plans are made by, conservation, odds, layouts."""

from itertools import product
from statistics import mean, stdev

import numpy as np
import pytest
from test_sim_host import Even, cluster, conserved, policies, run, workload

from tailrace.lab.research.specactor.systems import SYSTEMS, decoupled
from tailrace.lab.research.specactor.systems import run as run_specactor
from tailrace.lab.simulator.acceptance import ModelledMethod
from tailrace.lab.simulator.chunks import GroupProgress, SimulatedChunk, SimulatedSample
from tailrace.lab.simulator.decoupled import RECONFIGURE_STEPS, DraftModelSpeculation, DraftSetup, Odds, best_way
from tailrace.lab.simulator.replica import ModelledReplica
from tailrace.lab.simulator.scenario import load_scenario
from tailrace.lab.simulator.speculation import FOREVER, Pace, PlainDecoding
from tailrace.lab.simulator.types import ReplicaModel, StepModel, WorkloadGroup
from tailrace.policies.models.spec_cost_model import DrafterCost, VerifierCost, coupled_tokens_s, renewal_tokens_s
from tailrace.policies.models.specactor_planner import Decoupled, Plan

STEP = StepModel(0.011, 5e-5, 0.0)
VERIFIER = VerifierCost(4, 0.0, STEP.token_s, STEP.base_s)


def drafted(way: DraftSetup, races=None) -> DraftModelSpeculation:
    """All samples alike."""
    return DraftModelSpeculation(way, Odds(0, spread=0.0), STEP, races)


def method(p: float, name: str = "small", base_s: float = 0.003, token_s: float = 1e-5) -> ModelledMethod:
    return ModelledMethod(name, Even(p), base_s, token_s)


def chunks(count: int, context: int = 100) -> list[SimulatedChunk]:
    families = [GroupProgress(WorkloadGroup(f"g{i}", context, (900,)), 0) for i in range(count)]
    return [
        SimulatedChunk(f"c{i}", SimulatedSample(family, 0, 0.0), 900, 900, (0, 0)) for i, family in enumerate(families)
    ]


def tokens_s(pace: Pace, step: StepModel = STEP, context: float = 0.0) -> float:
    """Of the first chunk, as a replica takes its rounds."""
    return pace.rates[0] / max(pace.floor_s, step.seconds(sum(pace.costs), context) + pace.added_s)


@pytest.mark.parametrize(("p", "window", "count"), list(product((0.0, 0.3, 0.7, 0.95), (1, 3, 6), (1, 2, 40))))
def test_rounds_come_to_the_rates_that_plans_are_made_by(p, window, count):
    way, drafter = method(p), DrafterCost(1, 1e-5, 0.003)
    ahead = drafted(DraftSetup(way, window, True)).pace(chunks(count), 0.0)
    assert tokens_s(ahead) == pytest.approx(renewal_tokens_s(p, drafter, VERIFIER, count, window))
    waits = drafted(DraftSetup(way, window, False)).pace(chunks(count), 0.0)
    assert tokens_s(waits) == pytest.approx(coupled_tokens_s(p, drafter, VERIFIER, count, window))
    plain = drafted(DraftSetup(way, 0, False)).pace(chunks(count), 0.0)
    assert tokens_s(plain) == pytest.approx(1 / VERIFIER.seconds(count, 0))


@pytest.mark.parametrize("p", [0.2, 0.6, 0.9])
def test_the_best_way_is_the_best_of_all_windows_and_of_both_kinds(p):
    way, rate = best_way(method(p), p, VERIFIER, 1)
    rates = [tokens_s(drafted(DraftSetup(method(p), w, False)).pace(chunks(1), 0.0)) for w in range(17)]
    assert rate >= max(rates)
    assert tokens_s(drafted(way).pace(chunks(1), 0.0)) == pytest.approx(rate)


def test_who_waits_beside_others_that_do_not_is_verified_every_second_round():
    races = {
        "other": DraftSetup(method(0.5, "other"), 3, False),
        "free": DraftSetup(method(0.5, "free", 0.0, 0.0), 3, False),
    }
    running = chunks(3)
    running[1].method, running[2].method = "other", "free"
    pace = drafted(DraftSetup(method(0.5), 3, True), races).pace(running, 0.0)
    made = 1 + 0.5 + 0.25 + 0.125
    assert pace.rates[1:] == [made / 2, made], "a draft that takes no time holds nobody up"
    assert pace.parts[1:] == (0.5, 1.0) and pace.costs[1:] == [2.0, 4.0]
    assert pace.floor_s == pytest.approx(2 * 3 * (0.003 + 1e-5)), "two models draft, one after the other"


class Part(PlainDecoding):
    """A chunk that takes part in a share of the rounds, each of which takes longer."""

    def stale(self, changes, running):
        return changes > 0

    def pace(self, running, context_tokens):
        return Pace([1.25] * len(running), [2.0] * len(running), 0.0, FOREVER, 0.004, [0.4] * len(running))


def test_a_replica_reads_the_context_of_those_that_take_part():
    step = StepModel(0.01, 1e-4, 1e-5)
    model = ReplicaModel(step, 10_000, 8, 1e12, 0.0, 0.0)
    replica, (chunk,) = ModelledReplica(model, 0, Part()), chunks(1)
    replica.submit(chunk, 0.0)
    while replica.due_s < float("inf"):
        end_s = replica.due_s
        replica.turn()
    rounds = 900 / 1.25
    assert chunk.verifications == pytest.approx(0.4 * rounds)
    assert chunk.drafted == pytest.approx((2.0 - 0.4) * rounds)
    played_s = sum(step.seconds(2.0, 0.4 * (100 + 1.25 * i)) + 0.004 for i in range(int(rounds)))
    assert end_s == pytest.approx(played_s)


@pytest.mark.parametrize("way", [(0, False), (3, False), (1, True), (5, True)])
def test_every_sample_ends_once_whatever_drafts_it(way):
    work = workload(steps=2)
    for how, admission in ((policies(), True), (policies("group_static", "pinned", None), False)):
        got = run(
            work, cluster(), how, admission=admission,
            speculation=lambda index: DraftModelSpeculation(
                DraftSetup(method(0.6), *way), Odds(0), cluster().replica.step
            ),
        )  # fmt: skip
        assert conserved(work, got)
        assert all(one.verifications + one.accepted == pytest.approx(one.tokens) for one in got.ended)
        assert (sum(one.drafted for one in got.ended) > 0) == (way[0] > 0)


def test_odds_are_a_sample_s_own_with_each_method_and_lie_about_the_table_s():
    groups = [WorkloadGroup(f"g{i}", 1, (9,)) for i in range(2_000)]
    odds, one, other = Odds(3, spread=0.5), method(0.6), method(0.6, "other")
    p = np.array([[odds.chance(way, group, 0) for group in groups] for way in (one, other)])
    logs = np.log(p / (1 - p))
    assert np.median(logs) == pytest.approx(np.log(0.6 / 0.4), abs=0.05)
    assert logs.std() == pytest.approx(0.5, rel=0.05) and abs(np.corrcoef(logs)[0, 1]) < 0.06
    late = Odds(3, spread=0.5)
    assert [late.chance(other, group, 0) for group in reversed(groups)] == p[1][::-1].tolist()
    assert Odds(4, spread=0.5).chance(one, groups[0], 0) != p[0][0]
    faced = odds.facing(one)
    assert faced.acceptance.chance(groups[7], 0, 5, 3, 1) == p[0][7], "mates and history are no evidence to a model"


def test_samples_below_the_mean_are_drafted_anew_every_so_many_steps():
    plan = Plan(DrafterCost(1, 1e-5, 0.003), VERIFIER, 4, 40, 0.0, "given")
    policy, odds, running = Decoupled(rate="renewal"), Odds(1, spread=1.0), chunks(40)
    way = DraftModelSpeculation(DraftSetup(method(0.6), 4, True), odds, STEP, None, plan, policy)
    before = way.pace(running, 0.0)
    assert before.steps == RECONFIGURE_STEPS and len(set(before.parts)) == 40
    for chunk in running:
        chunk.since = RECONFIGURE_STEPS
    after = way.pace(running, 0.0)
    chances = [odds.of(method(0.6), chunk.sample) for chunk in running]
    same = [a == b for a, b in zip(before.rates, after.rates, strict=True)]
    assert same == [p >= mean(chances) for p in chances]


@pytest.mark.parametrize("published", [True, False])
def test_groups_fit_into_the_cluster_and_verify_on_their_own_gpus(published):
    scenario = load_scenario("grpo-32b")
    layout = decoupled(scenario, published)
    size = layout.plan.drafter_gpus + layout.plan.verifier_gpus
    assert layout.cluster.replica.gpus == size
    assert scenario.gpus.value - size < layout.cluster.replicas * size <= scenario.gpus.value
    assert (layout.way.window > 0) == layout.way.ahead == (layout.plan.drafter is not None)
    assert published <= layout.way.ahead, "the paper's algorithm has no plain decoding to choose"


def test_a_paper_s_systems_conserve_and_keep_their_bounds():
    scenario = load_scenario("ppo-32b").scaled(0.15)
    scenario = scenario.model_copy(update={"prompts": scenario.prompts.scaled(30, 1.0)})
    for name in SYSTEMS:
        got = run_specactor(scenario, name, 0, check=True)
        assert len(got.ended) == 30 and got.makespan_s >= got.bounds["best_s"]
        assert got == run_specactor(scenario, name, 0)
    spans = run_specactor(scenario, "specactor", 0, spans=True).spans
    assert "race" in {span.role for span in spans}
    assert stdev(one.tokens for one in got.ended) > 100
