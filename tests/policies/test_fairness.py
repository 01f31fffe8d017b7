"""Batches in flight side by side: priorities, shares, and no influence on a batch that is alone."""

import pytest
from rollout_machine import FAIRNESS, ORDERINGS, policies_of

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.fairness import FairShares
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EmitGroup, StartChunk
from tailrace.policies.protocol.events import IllegalEvent
from tailrace.policies.protocol.views import BatchView

CHUNK = 64


class Cluster:
    """A core with `replicas` replicas of `slots` places. Chunks that run end together, at a tick each."""

    def __init__(self, fairness: str, ordering: str = "seer", replicas: int = 2, slots: int = 4):
        self.core = RolloutCore(policies_of(ordering, "least_kv", CHUNK, fairness=fairness))
        self.now, self.starts, self.emitted, self.running = 0.0, [], {}, {}
        self.lengths: dict[str, int] = {}
        for number in range(replicas):
            self.core.observe(ev.ReplicaJoined(0.0, f"r{number}", 16, 4_000, slots, 0, 0))

    def submit(self, name: str, groups: int, samples: int, tokens: int, prompt: int = 10, **rank) -> None:
        specs = tuple(ev.GroupSpec(f"{name}/{i}", prompt, samples, tokens) for i in range(groups))
        if self.core.policies.ordering.type == "oracle_longest_first":
            ids = [f"{spec.group_id}#{i}" for spec in specs for i in range(samples)]
            self.core.observe(ev.LengthsRevealed(self.now, dict.fromkeys(ids, tokens)))
        self.core.observe(ev.SamplesSubmitted(self.now, name, specs, **rank))

    def tick(self) -> list[StartChunk]:
        """End every running chunk, and decide."""
        for start in self.running.values():
            done = ev.ChunkEnd.LENGTH
            self.core.observe(ev.ChunkFinished(self.now, start.chunk_id, start.max_tokens, done, 0))
        self.now += 1.0
        actions = self.core.decide(ev.Tick(self.now))
        starts = [action for action in actions if isinstance(action, StartChunk)]
        self.running = {start.chunk_id: start for start in starts}
        self.starts += starts
        for action in actions:
            if isinstance(action, EmitGroup):
                self.emitted[action.batch_id] = self.now
        return starts

    def run_out(self) -> None:
        while self.core.counts()["batches"]:
            self.tick()


def batches_of(starts: list[StartChunk]) -> list[str]:
    return sorted(start.sample_id.partition("/")[0] for start in starts)


def ticks_of_short_batch(fairness: str, ordering: str) -> tuple[float, float]:
    """Ticks of 8 short samples alone, and alongside 160 samples of 16 chunks that have begun."""
    alone = Cluster(fairness, ordering)
    alone.submit("short", 2, 4, 4 * CHUNK)
    alone.run_out()
    shared = Cluster(fairness, ordering)
    shared.submit("long", 20, 8, 16 * CHUNK)
    for _ in range(3):
        shared.tick()
    began = shared.now
    shared.submit("short", 2, 4, 4 * CHUNK)
    while "short" not in shared.emitted or shared.core.knows_batch("short"):
        shared.tick()
    return alone.emitted["short"], shared.emitted["short"] - began


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_a_short_batch_beside_a_long_one_takes_about_twice_as_long_as_alone(ordering):
    alone, shared = ticks_of_short_batch("fair_shares", ordering)
    assert shared <= 2 * alone + 1


def test_in_one_queue_it_waits_for_the_long_one():
    alone, shared = ticks_of_short_batch("one_queue", "seer")
    assert shared > 10 * alone


@pytest.mark.parametrize("ordering", ["seer", "group_static"])
def test_shares_divide_the_running_kv(ordering):
    cluster = Cluster("fair_shares", ordering)
    cluster.submit("a", 8, 8, 16 * CHUNK, share=3.0)
    cluster.submit("b", 8, 8, 16 * CHUNK, share=1.0)
    for _ in range(4):
        assert batches_of(cluster.tick()).count("a") in (5, 6, 7)  # chunks differ in KV


@pytest.mark.parametrize("ordering", ["seer", "group_static"])
def test_priorities_are_strict_and_no_room_stays_free(ordering):
    cluster = Cluster("fair_shares", ordering)
    cluster.submit("low", 8, 8, 16 * CHUNK)
    cluster.submit("high", 8, 8, 2 * CHUNK, priority=1, share=0.001)
    assert batches_of(cluster.tick()) == ["high"] * 8
    cluster.run_out()
    assert cluster.emitted["high"] < cluster.emitted["low"]

    cluster = Cluster("fair_shares", ordering)
    cluster.submit("low", 8, 8, 16 * CHUNK)
    cluster.submit("high", 2, 1, 2 * CHUNK, priority=1)
    assert batches_of(cluster.tick()) == ["high"] * 2 + ["low"] * 6


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_batches_of_equal_rank_begin_in_the_order_in_which_they_came(ordering):
    cluster = Cluster("fair_shares", ordering, replicas=1, slots=1)
    for name in ("b", "c", "a"):
        cluster.submit(name, 1, 1, CHUNK)
    assert [batches_of(cluster.tick()) for _ in range(3)] == [["b"], ["c"], ["a"]]


def test_a_batch_whose_samples_do_not_fit_does_not_hold_up_the_next():
    cluster = Cluster("fair_shares", replicas=1)
    cluster.submit("large", 1, 2, CHUNK, prompt=40_000, priority=1)
    cluster.submit("small", 1, 4, CHUNK)
    assert batches_of(cluster.tick()) == ["large", "small", "small", "small"]


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_alone_a_batch_runs_alike_under_all_policies(ordering):
    found = []
    for fairness in FAIRNESS:
        cluster = Cluster(fairness, ordering)
        for name in ("one", "two"):
            cluster.submit(name, 6, 5, 7 * CHUNK, priority=3, share=0.1)
            cluster.run_out()
        found.append(cluster.starts)
    assert found[0] == found[1] and len(found[0]) == 2 * 30 * 7


def test_nothing_of_a_batch_that_is_over_stays_in_the_queues():
    cluster = Cluster("fair_shares", "group_static")
    for name in ("a", "b"):
        cluster.submit(name, 4, 3, 2 * CHUNK)
    cluster.run_out()
    assert not any(cluster.core._waiting._queues.values())


def test_the_key_and_illegal_shares():
    key = FairShares().key
    assert key(BatchView("a", 1, 1.0, 500)) < key(BatchView("b", 0, 1.0, 0))
    assert key(BatchView("a", 0, 2.0, 500)) < key(BatchView("b", 0, 1.0, 300))
    core = RolloutCore(policies_of("fcfs", "least_kv", CHUNK))
    for share in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(IllegalEvent, match="share"):
            core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 1, 1, 1),), 0, share))
