"""Fastest-of-N and replicas given back: what a race may never change, what it gains, and who has to give way."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from test_sim_host import Even, cluster, conserved, policies, run, workload

from app.simulator.acceptance import Method
from app.simulator.decoupled import Drafted, Odds, Way
from app.simulator.host import simulate
from app.simulator.races import LOOK_S, Racing
from app.simulator.report import replica_seconds
from app.simulator.types import Cluster, Group, ReplicaModel, StepModel, Workload
from policies.bundle import load_policy
from policies.racing import FastestOfN, Ladder, Rung
from policies.scaling import Limits
from policies.tail import Consolidate, Release

ACCEPTS = {"good": 0.9, "fair": 0.6, "bad": 0.1}
GOOD, FAIR, BAD = (Method(name, Even(p)) for name, p in ACCEPTS.items())
LADDER = Ladder(tuple(Rung(name, ((0.0, 1.0), (1.0, 4.0)), (p,)) for name, p in ACCEPTS.items()))
FLAT = ReplicaModel(StepModel(0.02, 0.0, 0.0), 40_000, 64, 1e12, 1e5, 0.01)
"""Steps take as long whatever they compute, and so do joins: copies are in nobody's way."""


def racing(own: Method | None = BAD, room: int = 4, spread: float = 1.0, seed: int = 0) -> tuple[Racing, dict]:
    """And the arguments of `simulate` that go with it."""
    odds, methods = Odds(seed, spread), {method.name: method for method in (GOOD, FAIR, BAD)}
    ways = {name: Way(method, 3, False) for name, method in methods.items()}
    way = ways[own.name] if own else Way(GOOD, 0, False)
    made = Racing(FastestOfN(), LADDER, methods, own.name if own else None, odds, room)
    return made, {"speculation": lambda index: Drafted(way, odds, FLAT.step, ways)}


def race(work: Workload, where: Cluster, how, races: bool = True, **more):
    made, drafted = racing()
    return run(work, where, how, racing=made if races else None, **drafted, **more)


STATIC = policies("group_static", "pinned", None)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kv_tokens", [900, 4_000])
def test_races_change_times_and_nothing_else(seed, kv_tokens):
    """With chunks or without, room or none: the core takes every event, and KV is not over-reserved."""
    for how, admission in ((STATIC, False), (policies(chunk=150), True), (policies("remaining_first", chunk=90), True)):
        work = workload(seed, groups=6, steps=2)
        got = race(work, cluster(kv_tokens=kv_tokens), how, admission=admission, spans=True)
        assert conserved(work, got)
        assert all(one.verifications + one.accepted == pytest.approx(one.tokens) for one in got.ended)
        assert got == race(work, cluster(kv_tokens=kv_tokens), how, admission=admission, spans=True)


def test_where_copies_are_in_nobody_s_way_they_only_gain():
    gained = 0.0
    for seed in range(2):
        work, where = workload(seed, groups=6), Cluster(FLAT, 4)
        alone, raced = (race(work, where, STATIC, races, admission=False) for races in (False, True))
        ends = [{one.sample_id: one.ended_s for one in got.ended} for got in (alone, raced)]
        for sample_id, end_s in ends[1].items():
            assert end_s <= ends[0][sample_id] + FLAT.step.base_s + 1e-9, "who is beaten stops a step later"
        gained += 1 - raced.makespan_s / alone.makespan_s
    assert gained / 2 > 0.2


def test_a_straggler_is_as_fast_as_the_best_method_from_the_first_look_on():
    """Two samples; one ends at once, and its replica takes a copy of the other."""
    work = Workload("two", 2_000, ((Group("a", 10, (4,)), Group("b", 10, (2_000,))),))
    made, drafted = racing(own=None, spread=0.0)
    got = run(work, Cluster(FLAT, 2), STATIC, admission=False, racing=made, **drafted, spans=True)
    look_s = LOOK_S + 4 * 0.02
    rate = 1 + 0.9 + 0.81 + 0.729
    rest = 2_000 - int(look_s / 0.02) - 1
    assert got.makespan_s == pytest.approx(look_s + rest / rate * 0.02, abs=0.1)
    races = [span for span in got.spans if span.role == "race"]
    assert [(span.sample_id, span.replica) for span in races] == [("b#0", 0)]
    assert got.ended[-1].verifications == pytest.approx(2_000 - rest + rest / rate, abs=2)


def test_losers_stop_and_each_replica_drafts_copies_by_one_method_at_a_time():
    got = race(workload(1, groups=9), Cluster(FLAT, 5), STATIC, admission=False, spans=True)
    ended = {one.sample_id: one.ended_s for one in got.ended}
    races = [span for span in got.spans if span.role == "race"]
    assert len(races) > 8
    assert all(span.end_s <= ended[span.sample_id] + FLAT.step.base_s + 1e-9 for span in races)
    own = {span.sample_id: span.replica for span in got.spans if span.role == "generate"}
    assert all(own[span.sample_id] != span.replica for span in races)
    by_sample = defaultdict(list)
    for span in races:
        by_sample[span.sample_id].append(span.begin_s)
    assert max(map(len, by_sample.values())) >= 2, "some race with all methods"


def test_copies_give_way_to_what_the_core_starts():
    """Chunks come back for room that copies hold: nothing is preempted, and some copies are stopped on the way."""
    work = workload(3, groups=10)
    got = race(work, cluster(replicas=2, kv_tokens=2_600, running=3), policies(chunk=60), spans=True)
    assert conserved(work, got) and not sum(one.preemptions for one in got.ended)


def test_replicas_given_back_come_again_for_the_next_step():
    """Whole groups are bound: nobody misses an idle replica, and whoever is newer than all busy ones is one."""
    work, where = workload(2, groups=9, steps=3), Cluster(FLAT, 5)
    releasing = STATIC.model_copy(update={"tail": Release(after_s=0.0)})
    kept, given = (
        simulate(work, where, how, admission=False, elastic=Limits(1, 5), check=True) for how in (STATIC, releasing)
    )
    assert conserved(work, given)
    first = [tuple(one for one in got.ended if one.step == 0) for got in (kept, given)]
    assert first[0] == first[1] and len(first[0]) == 9 * 4
    paid = [replica_seconds(got.moments, got.makespan_s) / got.makespan_s for got in (kept, given)]
    assert paid[0] == pytest.approx(5) and paid[1] < 4.8
    up = [moment.replicas for moment in given.moments]
    assert max(up) == 5 and sum(later > before for before, later in pairwise(up)) == 2, "up again for two more steps"


@pytest.mark.parametrize("tail", ["release", "consolidate", "threshold"])
def test_chunks_go_on_without_the_replicas_that_went_home(tail):
    work = workload(5, groups=6, steps=2)
    how = policies(chunk=80).model_copy(update={"tail": load_policy("tail", {"type": tail, "after_s": 0.0})})
    got = run(work, cluster(kv_tokens=4_000), how, elastic=Limits(1, 3))
    assert conserved(work, got) and min(moment.replicas for moment in got.moments) < 3


def test_a_replica_that_is_wanted_again_takes_its_time_to_start():
    work = workload(5, groups=6, steps=2)
    how = policies(chunk=80).model_copy(update={"tail": Consolidate(after_s=0.0, max_slowdown=9.0)})
    slow = replace(cluster(kv_tokens=4_000), replica=replace(cluster(kv_tokens=4_000).replica, start_s=50.0))
    quick, late = (run(work, where, how, elastic=Limits(1, 3)) for where in (cluster(kv_tokens=4_000), slow))
    assert conserved(work, late) and late.makespan_s > quick.makespan_s


def test_what_a_replica_occupied_is_free_a_while_after_it_went():
    how = policies(chunk=80).model_copy(update={"tail": Consolidate(after_s=0.0, max_slowdown=9.0)})
    paid = []
    for stop_s in (0.0, 1.0):
        where = cluster(kv_tokens=4_000)
        got = run(workload(5, groups=6), replace(where, replica=replace(where.replica, stop_s=stop_s)), how,
                  elastic=Limits(1, 3))  # fmt: skip
        paid.append(replica_seconds(got.moments, got.makespan_s))
    assert paid[0] + 1.0 < paid[1] <= paid[0] + 2 * 1.5, "two replicas go, and moments lie apart"
