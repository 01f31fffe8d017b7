"""Replicas join once, leave once, and never come back by an old report."""

from dataclasses import replace

from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.policies.protocol.events import ReplicaJoined, ReplicaLeft, TokensStreamed


def report(name: str, version: int = 0, **running) -> EngineStats:
    return EngineStats(
        replica_id=name, weights_version=version, block_tokens=32, kv_capacity_blocks=100, max_running=8,
        max_model_len=512, draft_tokens=0, observed_at=50.0, running=running,
    )  # fmt: skip


def observe(roster: ReplicaRegistry, reports: list[EngineStats], made_at: float, now: float) -> list:
    return roster.observe([(one, made_at) for one in reports], now)


def kinds(events):
    return [(type(event), getattr(event, "replica_id", None)) for event in events]


def test_a_replica_joins_once_and_again_with_new_weights():
    roster = ReplicaRegistry()
    assert kinds(observe(roster, [report("b"), report("a")], 0.0, 1.0)) == [(ReplicaJoined, "a"), (ReplicaJoined, "b")]
    assert observe(roster, [report("a"), report("b")], 1.0, 2.0) == []
    (joined,) = observe(roster, [report("a", version=1), report("b")], 2.0, 3.0)
    assert (joined.replica_id, joined.weights_version) == ("a", 1)


def test_a_replica_joins_again_when_it_drafts_by_other_methods():
    roster, indexed = ReplicaRegistry(), ("group", "ngram")
    observe(roster, [replace(report("a"), methods=indexed)], 0.0, 1.0)
    assert observe(roster, [replace(report("a"), methods=indexed)], 1.0, 2.0) == []
    for methods in (("model", *indexed), indexed):  # a draft model comes, and goes
        (joined,) = observe(roster, [replace(report("a"), methods=methods)], 2.0, 3.0)
        assert joined.methods == methods


def test_running_chunks_are_streamed_with_the_time_of_the_report():
    roster = ReplicaRegistry()
    events = observe(roster, [report("a", chunk=7)], 59.0, 60.0)
    assert events[-1] == TokensStreamed(60.0, {"chunk": 7}, observed_at=59.0)
    assert roster.observed_at == {"a": 59.0}


def test_a_report_counts_once_however_often_it_is_looked_at():
    roster = ReplicaRegistry()
    observe(roster, [report("a", chunk=7)], 59.0, 60.0)
    assert observe(roster, [report("a", chunk=7)], 59.0, 60.5) == []
    assert [type(event) for event in observe(roster, [report("a", chunk=8)], 60.6, 61.0)] == [TokensStreamed]


def test_a_replica_without_reports_leaves_once():
    roster = ReplicaRegistry()
    observe(roster, [report("a"), report("b")], 0.0, 1.0)
    looks = [observe(roster, [report("b")], look + 1.0, look + 2.0) for look in range(12)]
    assert kinds([event for look in looks for event in look]) == [(ReplicaLeft, "a")]


def test_an_old_report_does_not_bring_a_lost_replica_back():
    roster = ReplicaRegistry()
    observe(roster, [report("a")], 0.0, 1.0)
    roster.lose("a", now=5.0)
    assert observe(roster, [report("a")], 4.9, 5.1) == []
    assert kinds(observe(roster, [report("a")], 5.2, 5.3)) == [(ReplicaJoined, "a")]
