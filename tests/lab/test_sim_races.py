"""Fastest-of-N and replicas given back, by the core: what a race may never change, what it gains, who gives way."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import pytest
from test_sim_host import Even, cluster, conserved, policies, run, workload

from tailrace.lab.simulator import host
from tailrace.lab.simulator.acceptance import ModelledMethod
from tailrace.lab.simulator.decoupled import DraftModelSpeculation, DraftSetup, Odds
from tailrace.lab.simulator.host import TICK_S, simulate
from tailrace.lab.simulator.report import replica_seconds
from tailrace.lab.simulator.types import Cluster, ReplicaModel, StepModel, Workload, WorkloadGroup
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.lanes import NoLanes
from tailrace.policies.families.racing import FastestOfN, MethodProfile
from tailrace.policies.families.registry import Policies, load_policy
from tailrace.policies.families.tail import Consolidate, Hold, Release
from tailrace.policies.protocol.actions import AbortChunk, StartChunk
from tailrace.policies.protocol.events import ChunkFinished

ACCEPTS = {"good": 0.9, "fair": 0.6, "bad": 0.1}
METHODS = {name: ModelledMethod(name, Even(p)) for name, p in ACCEPTS.items()}
RUNGS = tuple(MethodProfile(name, ((0.0, 1.0), (1.0, 4.0)), (p,)) for name, p in ACCEPTS.items())
PLAIN = MethodProfile("plain", ((0.0, 1.0),), (0.0,))
FLAT = ReplicaModel(StepModel(0.02, 0.0, 0.0), 40_000, 64, 1e12, 1e5, 0.01)
"""Steps take as long whatever they compute, and so do joins: copies are in nobody's way."""


def race(work: Workload, where: Cluster, how: Policies, own="bad", room=4, spread=1.0, races=True, **more):
    """Chunks that are no copies draft by `own`, or plainly."""
    ways, odds = {name: DraftSetup(method, 3, False) for name, method in METHODS.items()}, Odds(0, spread)
    way = ways.get(own, DraftSetup(METHODS["good"], 0, False))
    if races:
        rungs = RUNGS if own in ACCEPTS else (PLAIN, *RUNGS)
        racing = FastestOfN(room=room, usual=ACCEPTS.get(own, 0.0), rungs=rungs)
        how = how.model_copy(update={"racing": racing})
    others = {name: one for name, one in ways.items() if name != own}
    return run(work, where, how, speculation=lambda index: DraftModelSpeculation(way, odds, FLAT.step, others), **more)


STATIC = policies("group_static", "pinned", None)
PIECES = policies("group_static", "pinned", 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kv_tokens", [900, 4_000])
def test_races_change_times_and_nothing_else(seed, kv_tokens):
    """With chunks or without, room or none: the core takes every event, and KV is not over-reserved."""
    work, where, raced = workload(seed, groups=6, steps=2), cluster(kv_tokens=kv_tokens), 0
    for how, admission in (
        (STATIC, False),
        (PIECES, False),
        (policies(chunk=150), True),
        (policies("remaining_first", chunk=90), True),
    ):
        got = race(work, where, how, admission=admission, spans=True)
        assert conserved(work, got)
        assert got == race(work, where, how, admission=admission, spans=True)
        raced += sum(span.role == "race" for span in got.spans)
        assert all(moment.running >= 0 and moment.waiting >= 0 for moment in got.moments)
    assert raced > 50


def test_where_copies_are_in_nobody_s_way_they_only_gain():
    """But for who is beaten, who stops a step later, and KV that comes from a winner's replica, chunk by chunk."""
    gained, late_s = 0.0, FLAT.step.base_s + FLAT.fetch_base_s + 700 / FLAT.fetch_tokens_s
    for seed in range(2):
        work, where = workload(seed, groups=6), Cluster(FLAT, 4)
        alone, raced = (race(work, where, PIECES, races=races, admission=False) for races in (False, True))
        ends = {one.sample_id: one.ended_s for one in alone.ended}
        assert all(one.ended_s <= ends[one.sample_id] + one.chunks * late_s for one in raced.ended)
        gained += 1 - raced.makespan_s / alone.makespan_s
    assert gained / 2 > 0.2


def test_a_straggler_is_as_fast_as_the_best_method_from_each_look_on():
    """Two samples; one ends at once, and its replica takes copies of the other, chunk by chunk."""
    work = Workload("two", 2_000, ((WorkloadGroup("a", 10, (4,)), WorkloadGroup("b", 10, (2_000,))),))
    pieces = policies("group_static", "pinned", 400)
    got = race(work, Cluster(FLAT, 2), pieces, own="plain", room=1, spread=0.0, admission=False, spans=True)
    rate = 1 + 0.9 + 0.81 + 0.729
    quick_s = 400 / rate * 0.02
    assert 5 * quick_s < got.makespan_s < 5 * (quick_s + TICK_S + 0.1) < 2_000 * 0.02 / 2
    races = [span for span in got.spans if span.role == "race"]
    assert [(span.sample_id, span.replica) for span in races] == [("b#0", 0)] * 5
    assert got.ended[-1].verifications == pytest.approx(2_000 / rate, abs=5), "steps of the beaten count for nobody"


class Recording(RolloutCore):
    """Writes down what it hears and says, and when."""

    log: ClassVar[list[tuple]] = []

    def observe(self, event):
        super().observe(event)
        self.log.append((event.now, event))

    def decide(self, tick):
        actions = super().decide(tick)
        self.log.extend((tick.now, action) for action in actions)
        return actions


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(Recording, "log", [])
    monkeypatch.setattr(host, "RolloutCore", Recording)
    race(workload(1, groups=9), Cluster(FLAT, 5), PIECES, admission=False)
    return Recording.log


def test_each_replica_drafts_copies_by_one_method_and_the_beaten_stop_a_step_later(recorded):
    copies, told, raced = {}, {}, defaultdict(set)
    for now, entry in recorded:
        if isinstance(entry, StartChunk) and entry.copy_of:
            beside = {other.method for other in copies.values() if other.replica_id == entry.replica_id}
            assert beside <= {entry.method}
            copies[entry.chunk_id] = entry
            raced[entry.copy_of].add(entry.method)
        elif isinstance(entry, AbortChunk):
            told[entry.chunk_id] = now
        elif isinstance(entry, ChunkFinished):
            copies.pop(entry.chunk_id, None)
            assert now <= told.get(entry.chunk_id, now) + FLAT.step.base_s + 0.02, "a step, and what is being saved"
    assert len(told) > 8 and max(map(len, raced.values())) >= 2, "some race with more than one method"


def test_the_core_hears_what_a_live_replica_would_tell_of_drafts(recorded):
    """Three tokens in each verification, and of these as many right as the method's chance says."""
    finished = [entry for _, entry in recorded if isinstance(entry, ChunkFinished) and entry.new_tokens > 60]
    shares = [event.accepted_tokens / event.drafted_tokens for event in finished]
    assert min(shares) < 0.2 and max(shares) > 0.6
    for event, share in zip(finished, shares, strict=True):
        assert event.drafted_tokens / 3 * (1 + 3 * share) == pytest.approx(event.new_tokens, abs=4)


def test_looks_are_a_second_apart_while_nothing_happens():
    work = Workload("long", 20_000, ((WorkloadGroup("a", 10, (20_000,)),),))
    how = STATIC.model_copy(update={"lanes": NoLanes()})  # lanes look at tokens, which come once a second, too
    got = race(work, Cluster(FLAT, 2), how, admission=False)
    assert got.makespan_s > 150 and abs(got.events - got.makespan_s / TICK_S) < 30


def test_copies_give_way_to_what_the_core_starts():
    """Chunks come back for room that copies hold: nothing is preempted, and some copies are stopped on the way."""
    work = workload(3, groups=10)
    got = race(work, cluster(replicas=2, kv_tokens=2_600, running=3), policies(chunk=60), spans=True)
    assert conserved(work, got) and not sum(one.preemptions for one in got.ended)
    assert any(span.role == "race" for span in got.spans)


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


@pytest.mark.parametrize("tail", ["release", "consolidate", "threshold", "auto"])
def test_chunks_go_on_without_the_replicas_that_went_home(tail):
    work = workload(5, groups=6, steps=2)
    how = policies(chunk=80).model_copy(update={"tail": load_policy("tail", {"type": tail, "after_s": 0.0})})
    got = run(work, cluster(kv_tokens=4_000), how, elastic=Limits(1, 3))
    assert conserved(work, got) and min(moment.replicas for moment in got.moments) < 3


@pytest.mark.parametrize("seed", range(3))
def test_auto_costs_less_than_keeping_all_by_its_own_reckoning(seed):
    """Makespan, and a second of all replicas as much as one of it."""
    work, where, cost = workload(seed, groups=6), cluster(kv_tokens=4_000), {}
    for tail in ("hold", {"type": "auto", "worth": 1.0}):
        how = policies(chunk=80).model_copy(update={"tail": load_policy("tail", tail)})
        got = run(work, where, how, elastic=Limits(1, 3))
        cost[how.tail.type] = got.makespan_s + replica_seconds(got.moments, got.makespan_s) / 3
    assert cost["auto"] < cost["hold"]


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


class Watching(Hold):
    """Keeps all replicas, and the expected tokens left that it was shown."""

    counts_moves: ClassVar[bool] = True
    left: ClassVar[list[int]] = []

    def wanted(self, view, memory):
        self.left.append(view.left_tokens)
        return super().wanted(view, memory)


def test_a_tail_knows_what_a_chunk_has_made_as_in_the_service():
    """A sample of 500 tokens in one chunk: a step takes 20 ms, and replicas report once a second."""
    work = Workload("one", 500, ((WorkloadGroup("g", 10, (500,)),),))
    Watching.left.clear()
    how = STATIC.model_copy(update={"tail": Watching(), "lanes": NoLanes()})
    run(work, Cluster(FLAT, 2), how, elastic=Limits(1, 2), admission=False)
    shown = [left for left in Watching.left if left]
    assert shown[0] == 500 and shown[-1] < 60 and shown == sorted(shown, reverse=True)
