"""A recorded live run tells a fresh core the same and hears the same; whatever is changed in it is noticed."""

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.deployments.coordinator import journal as module
from tailrace.deployments.coordinator.core_holder import CoreHolder
from tailrace.deployments.coordinator.journal import Decision, Journal, JournaledCore, read_journal, replay
from tailrace.deployments.messages.liveness import LEASE_S
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, EndSample, ReleaseKv, StartChunk
from tailrace.policies.protocol.events import IllegalEvent

RECORDED = Path(__file__).parents[1] / "data" / "journal.jsonl.gz"
"""Of the demo model on two replicas, in chunks, with drafts, and with new weights under way. Its `min_pull_tokens` were
renewed when the number of running chunks began to count, and `lanes` was named; no other answer changed.
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return gzip.decompress(RECORDED.read_bytes()).decode().splitlines()


@pytest.fixture(scope="module")
def live(lines) -> Journal:
    return read_journal(lines)


def of(live: Journal, kind: type) -> list:
    """Its events of a kind, or its actions of one."""
    actions = [action for entry in live.entries if isinstance(entry, Decision) for action in entry.actions]
    return [one for one in (*live.entries, *actions) if isinstance(one, kind)]


def changed(live: Journal, old, new) -> Journal:
    return replace(live, entries=tuple(new if entry is old else entry for entry in live.entries))


def test_a_fresh_core_answers_a_live_run_alike(live):
    assert replay(live) is None


def test_the_live_run_holds_what_a_run_can_hold(live):
    """Else the test above shows little."""
    starts = of(live, StartChunk)
    joined = [(event.replica_id, event.weights_version) for event in of(live, ev.ReplicaJoined)]
    assert len({name for name, _ in joined}) == 2 == len({start.replica_id for start in starts})
    assert sorted(version for _, version in joined) == [0, 0, 1, 1] and len(of(live, ev.WeightsChanged)) == 1
    assert len({start.sample_id for start in starts}) >= 16 and max(start.start for start in starts) > 0
    assert of(live, ev.TokensStreamed) and of(live, ev.ReplicaMeasured) and of(live, ReleaseKv)
    assert len({start.min_pull_tokens for start in starts}) > 1, "some wait for the pool's KV, by measured speeds"
    assert len(of(live, EndSample)) == sum(g.samples for e in of(live, ev.SamplesSubmitted) for g in e.groups)


def test_a_change_of_what_was_told_changes_the_answers(live):
    """A chunk that had stopped goes on; a group with other samples; a replica with less room."""
    stop = next(one for one in of(live, ev.ChunkFinished) if one.end is ev.ChunkEnd.STOP)
    joined, submitted = of(live, ev.ReplicaJoined)[0], of(live, ev.SamplesSubmitted)[0]
    fewer = replace(submitted, groups=(replace(submitted.groups[0], samples=1), *submitted.groups[1:]))
    for old, new in (
        (stop, replace(stop, end=ev.ChunkEnd.ABORTED)),
        (joined, replace(joined, max_running=1)),
        (submitted, fewer),
    ):
        try:
            assert replay(changed(live, old, new)) is not None
        except IllegalEvent:
            continue  # what came next could not have happened


def test_the_first_difference_is_named(live):
    tick = next(entry for entry in live.entries if isinstance(entry, Decision) and entry.actions)
    forged = (replace(tick.actions[0], reason="because"), *tick.actions[1:])
    found = replay(changed(live, tick, Decision(tick.tick, forged)))
    assert found == (live.entries.index(tick) + 2, forged, tick.actions)


def test_another_policy_answers_otherwise(live):
    ordering = "fcfs" if live.policies.ordering.type != "fcfs" else "seer"
    other = live.policies.model_copy(update={"ordering": Policies(ordering=ordering).ordering})
    assert replay(replace(live, policies=other)) is not None


def told(core: JournaledCore) -> JournaledCore:
    core.observe(ev.ReplicaJoined(0.5, "r", 16, 100, 4, 0, 3, "n"))
    core.observe(ev.SamplesSubmitted(1.0, "b", (ev.GroupSpec("g", 10, 2, 50, ((7, 9), (4,))),)))
    starts = [one for one in core.decide(ev.Tick(1.0)) if isinstance(one, StartChunk)]
    core.observe(ev.ChunkFinished(2.0, starts[0].chunk_id, 5, ev.ChunkEnd.STOP, 3, 12))
    core.observe(ev.KvLost(2.5, None))
    core.observe(ev.BatchCancelled(3.0, "b"))
    assert any(isinstance(one, AbortChunk) for one in core.decide(ev.Tick(3.0)))
    return core


def test_what_was_written_is_read_back_and_replayed():
    core = told(JournaledCore(Policies(), 3))
    again = read_journal(core.journal().splitlines())
    assert (again.policies, again.weights_version, again.dropped) == (Policies(), 3, 0)
    assert again.entries[0] == ev.ReplicaJoined(0.5, "r", 16, 100, 4, 0, 3, "n") and len(again.entries) == 7
    assert replay(again) is None


def test_an_illegal_event_is_not_kept():
    core = told(JournaledCore(Policies(), 3))
    before = core.journal()
    with pytest.raises(IllegalEvent):
        core.observe(ev.ReplicaLeft(4.0, "nobody", "gone"))
    assert core.journal() == before


def test_a_full_journal_keeps_its_beginning_and_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(module, "MOST_ENTRIES", 3)
    again = read_journal(told(JournaledCore(Policies(), 3)).journal().splitlines())
    assert (len(again.entries), again.dropped) == (3, 4)
    assert replay(again) is None


HEADER = JournaledCore(Policies()).journal().strip()
JOINED = {"now": 0.5, "replica_id": "r", "block_tokens": 16, "kv_capacity_blocks": 9, "max_running": 4,
          "draft_tokens": 0, "weights_version": 0, "node_id": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting"),
        ("[1]", "list"),
        ("{}", "unpack"),
        ({"ReplicaJoint": JOINED}, "'ReplicaJoint' is neither"),
        ({"ReplicaJoined": JOINED | {"colour": 1}}, "other fields than now"),
        ({"ReplicaJoined": {key: JOINED[key] for key in JOINED if key != "now"}}, "ReplicaJoined.now"),
        ({"ReplicaJoined": JOINED | {"max_running": "4"}}, "values of other kinds"),
        ({"ReplicaJoined": JOINED, "actions": []}, "an event is needed"),
        ({"Tick": {"now": 1.0}}, "stands with its actions"),
        ({"Tick": {"now": 1.0}, "actions": [{"ReplicaJoined": JOINED}]}, "stands with its actions"),
        ({"Prefetch": {"sample_id": "s", "replica_id": "r", "reason": ""}}, "an event is needed"),
    ],
)
def test_a_bad_line_is_named(line, said):
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(ValueError, match=f"line 3: not a line of a journal: .*{said}"):
        read_journal([HEADER, json.dumps({"ReplicaJoined": JOINED}), text])


def test_what_came_to_be_told_since_it_was_written_is_at_its_default():
    early = {key: JOINED[key] for key in JOINED if key != "node_id"}
    (event,) = read_journal([HEADER, json.dumps({"ReplicaJoined": early})]).entries
    assert event == ev.ReplicaJoined(**JOINED)


def test_a_journal_of_an_older_version_is_refused_by_the_field_that_it_lacks():
    rates = {"now": 1.0, "replica_id": "r", "prefill_tokens_s": 9.0, "observed_at": 1.0}
    with pytest.raises(ValueError, match=r"line 2: not a line of a journal: ReplicaMeasured.performance: .*required"):
        read_journal([HEADER, json.dumps({"ReplicaMeasured": rates})])


@pytest.mark.parametrize("header", [[], ["{}"], [HEADER.replace('"journal": 1', '"journal": 2')]])
def test_a_bad_header_is_named(header):
    with pytest.raises(ValueError, match="line 1: not a line of a journal"):
        read_journal(header)


def test_a_journal_imports_no_code():
    header = {"journal": 1, "policies": {"ordering": {"type": "antigravity:Ordering"}}, "weights_version": 0}
    line = json.dumps(header | {"limits": None, "dropped": 0})
    with pytest.raises(ValueError, match=r"policies\.ordering is of module antigravity; a journal imports no code"):
        read_journal([line])
    assert "antigravity" not in sys.modules


def test_begun_samples_are_read_back():
    core = JournaledCore(Policies())
    spec = ev.GroupSpec("g", 10, 2, 30, begun=(ev.Begun(0, 9, False, 3), ev.Begun(1, 12, True, 4)))
    core.observe(ev.SamplesSubmitted(0.0, "b", (spec,)))
    core.decide(ev.Tick(0.0))
    journal = read_journal(core.journal().splitlines())
    assert journal.entries[0].groups == (spec,) and replay(journal) is None


def holder_of(version: int, now: Callable[[], float]) -> CoreHolder:
    """With a core under these weights, which the next ones keep."""
    holder = CoreHolder(Policies(), now)
    holder.present.observe(ev.WeightsChanged(0.0, version))
    return holder


def test_policies_of_a_driver_have_the_sizes_of_the_engines_too():
    holder = holder_of(3, lambda: 0.0)
    holder.set_sizes(32, 3)
    for told in ({}, {"chunking": {"type": "fixed", "chunk_tokens": 64}, "draft_models": {"type": "planned"}}):
        assert holder.take_policies(told) is None and holder.due
        holder.exchange(())
        assert holder.present.policies == Policies(**told).sized(32, 3) != Policies(**told)
    assert holder.take_policies({"chunking": {"type": "fixed", "block_tokens": 8}}) is None
    holder.exchange(())
    assert holder.present.policies.chunking.block_tokens == 8, "a size that is set stays"


def test_a_journal_of_a_driver_that_dies_ends_and_frees_its_memory():
    clock = [0.0]
    holder = holder_of(3, lambda: clock[0])
    assert holder.journal(True) is None
    holder.exchange(())
    clock[0] = 40.0
    holder.renew_journal()
    clock[0] = 40.0 + LEASE_S
    holder.expire_journal()
    told(holder.present)
    assert len(read_journal(holder.present.journal().splitlines()).entries) > 3, "its driver lives"
    clock[0] = 40.1 + LEASE_S
    holder.expire_journal()
    holder.present.observe(ev.WeightsChanged(9.0, 7))  # other batches are in flight
    kept = read_journal(holder.present.journal().splitlines())
    assert kept.entries == () and kept.dropped > 4
    assert not holder.due, "batches of other drivers would wait until it is exchanged"
    clock[0] = 50.0 + LEASE_S
    holder.renew_journal()  # too late
    holder.set_limits(None)
    holder.exchange(())
    assert not isinstance(holder.present, JournaledCore)


def test_a_journal_that_was_taken_keeps_nothing_while_its_core_lives_on():
    holder = holder_of(3, lambda: 0.0)
    holder.journal(True)
    holder.exchange(())
    told(holder.present)
    written = read_journal(holder.journal(False).splitlines())
    assert written.entries and replay(written) is None
    holder.present.observe(ev.KvLost(9.0, None))
    assert read_journal(holder.present.journal().splitlines()).entries == ()
    assert holder.journal(True) is None, "it is another driver's, which has taken it"
    holder.exchange(())
    assert len(read_journal(told(holder.present).journal().splitlines()).entries) > 3
