"""Simulated samples of several turns: held, or each turn a new request; the laws are checked at every event."""

from collections import defaultdict

import pytest

from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.scenario import load_scenario
from tailrace.lab.simulator.systems import Setup, system
from tailrace.lab.simulator.types import Cluster, Gap, ReplicaModel, StepModel, Workload, WorkloadGroup
from tailrace.policies.families.registry import Policies

MODEL = ReplicaModel(
    step=StepModel(0.01, 0.0001, 0.0),
    kv_capacity_tokens=4_000,
    max_running=8,
    prefill_tokens_s=1_000.0,
    fetch_tokens_s=1e6,
    fetch_base_s=0.01,
)
POLICIES = Policies(placement="cost_aware", chunking={"type": "fixed", "chunk_tokens": 100}, drafting="off")
SYSTEMS = ("verl", "seer", "tailrace", "tailrace_requests")
MORE = ("tailrace_near", "tailrace_consolidate")


def one_sample(*gaps: Gap, length: int = 300) -> Workload:
    return Workload("one", 1_000, ((WorkloadGroup("g", 200, (length,), (), 1.0, (gaps,)),),))


def alone(work: Workload, **given):
    return simulate(work, Cluster(MODEL, 2), POLICIES, check=True, **given)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SYSTEMS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_every_system_plays_turns_by_the_laws(name):
    scenario = load_scenario("tools-8b").scaled(0.01)
    run = Setup.of(scenario, 1, steps=1).run(name, system(name), 1, check=True)
    groups = [group for step in scenario.workload(1, 1).steps for group in step]
    lengths = defaultdict(list)
    for group in groups:
        for index, length in enumerate(group.lengths):
            lengths[f"{group.group_id}#{index}"].append((length, len(group.gaps[index]) + 1))
    found = defaultdict(list)
    for ended in sorted(run.ended, key=lambda ended: ended.step):
        found[ended.sample_id].append((ended.tokens, ended.turns))
    assert found == lengths, "each sample ends once, with all its tokens in all its turns"


def test_a_tool_takes_its_time_and_the_replica_waits_for_it_alone():
    quick, slow = (alone(one_sample(Gap(100, tool_s, 50))).makespan_s for tool_s in (1.0, 31.0))
    assert slow - quick == pytest.approx(30.0)


def test_held_turns_compute_nothing_again_and_new_requests_the_answer_before():
    """Of a request the pool keeps the prompt, for a minute. The replica may have the answer's KV by chance."""
    work = one_sample(Gap(100, 5.0, 50), Gap(200, 5.0, 70))
    held, again = alone(work), alone(work, holds=False)
    (held_end,), (end,) = held.ended, again.ended
    assert held_end.returned_tokens == end.returned_tokens == (200 + 100) + (200 + 200 + 50)
    assert (held_end.recomputed_tokens, held_end.turns, held_end.tokens) == (0, 3, 300)
    assert end.recomputed_tokens in (0, 100, 200) and (end.turns, end.tokens) == (3, 300)
    (late,) = alone(one_sample(Gap(100, 61.0, 50)), holds=False).ended
    assert late.recomputed_tokens in (0, 300), "all of it, unless it comes to the replica where its KV is left"


@pytest.mark.long
def test_turns_as_requests_compute_more_again_and_take_longer():
    """At length: test_bench_turns.py asserts the same of both systems, by the command."""
    setup = Setup.of(load_scenario("tools-8b").scaled(0.015), 0)
    runs = {name: setup.run(name, system(name), 0) for name in ("tailrace_near", "tailrace_requests")}
    share = {
        name: sum(one.recomputed_tokens for one in run.ended) / sum(one.returned_tokens for one in run.ended)
        for name, run in runs.items()
    }
    assert share["tailrace_near"] < 0.05 < share["tailrace_requests"]
    assert runs["tailrace_near"].makespan_s < runs["tailrace_requests"].makespan_s


def test_a_workload_without_gaps_is_as_before_whatever_holds_says():
    work = Workload("none", 1_000, ((WorkloadGroup("g", 200, (300, 90)),),))
    assert alone(work) == alone(work, holds=False)
    (held,) = alone(one_sample()).ended
    assert (held.turns, held.tokens) == (1, 300), "a sample that might have returned, and does not"
