"""Replicas join once, leave once, and never come back by an old report."""

from dataclasses import replace

from tailrace.deployments.coordinator.replica_registry import MISSED_POLLS, ReplicaRegistry
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.policies.protocol.events import ReplicaJoined, ReplicaLeft, TokensStreamed


def report(name: str, version: int = 0, **running) -> EngineStats:
    return EngineStats(
        replica_id=name, weights_version=version, block_tokens=32, kv_capacity_blocks=100, max_running=8,
        max_model_len=512, draft_tokens=0, observed_at=50.0, running=running,
    )  # fmt: skip


def kinds(events):
    return [(type(event), getattr(event, "replica_id", None)) for event in events]


def test_a_replica_joins_once_and_again_with_new_weights():
    roster = ReplicaRegistry()
    assert kinds(roster.observe([report("b"), report("a")], 0.0, 1.0)) == [(ReplicaJoined, "a"), (ReplicaJoined, "b")]
    assert roster.observe([report("a"), report("b")], 1.0, 2.0) == []
    (joined,) = roster.observe([report("a", version=1), report("b")], 2.0, 3.0)
    assert (joined.replica_id, joined.weights_version) == ("a", 1)


def test_a_replica_joins_again_when_it_drafts_by_other_methods():
    roster, indexed = ReplicaRegistry(), ("group", "ngram")
    roster.observe([replace(report("a"), methods=indexed)], 0.0, 1.0)
    assert roster.observe([replace(report("a"), methods=indexed)], 1.0, 2.0) == []
    for methods in (("model", *indexed), indexed):  # a draft model comes, and goes
        (joined,) = roster.observe([replace(report("a"), methods=methods)], 2.0, 3.0)
        assert joined.methods == methods


def test_running_chunks_are_streamed_with_the_time_they_were_asked_for():
    roster = ReplicaRegistry()
    events = roster.observe([report("a", chunk=7)], 59.0, 60.0)
    assert events[-1] == TokensStreamed(60.0, "chunk", 7, observed_at=59.0)
    assert roster.observed_at == {"a": 59.0}
    assert roster.streamed() == {"chunk": 7}


def test_a_replica_that_no_poll_sees_leaves_once():
    roster = ReplicaRegistry()
    roster.observe([report("a"), report("b")], 0.0, 1.0)
    polls = [roster.observe([report("b")], poll + 1.0, poll + 2.0) for poll in range(2 * MISSED_POLLS)]
    events = [event for poll in polls for event in poll]
    assert kinds(events) == [(ReplicaLeft, "a")]


def test_an_old_report_does_not_bring_a_lost_replica_back():
    roster = ReplicaRegistry()
    roster.observe([report("a")], 0.0, 1.0)
    roster.lose("a", now=5.0)
    assert roster.observe([report("a")], asked_at=4.9, now=5.1) == []
    assert kinds(roster.observe([report("a")], asked_at=5.2, now=5.3)) == [(ReplicaJoined, "a")]
