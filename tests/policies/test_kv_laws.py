"""The laws of pooled KV, each over random plays of every ordering x placement, under both policies for updates.

Every test walks the events and actions of a play beside a `KvLedger`; none trusts the core's own books.
"""

from itertools import pairwise
from random import Random

import pytest
from kv_ledger import KvLedger, group_of
from rollout_machine import Player, policies_of
from test_laws import law

from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import (
    AbortChunk,
    EmitGroup,
    EndSample,
    Prefetch,
    ReleaseCause,
    ReleaseKv,
    SampleEnd,
    StartChunk,
)


def walk(played):
    """Every event, its actions, and the ledger before the two took effect."""
    ledger = KvLedger(keeps=played.core.policies.kv_on_update.type == "keep")
    for event, actions in played.steps:
        yield event, actions, ledger
        ledger.note(event, actions)
    assert not (ledger.due or ledger.held or ledger.groups or ledger.running), "everything has ended"


@pytest.mark.slow
@law
def test_a_chunk_reads_and_writes_the_kv_that_the_policy_says(played):
    """Law 6, version: of the present weights, or, if samples keep theirs, of those that made the first token."""
    for _, actions, ledger in walk(played):
        for action in actions:
            if isinstance(action, StartChunk):
                assert action.weights_version == ledger.version
                assert action.kv_version == ledger.kv_version(action.sample_id)


@pytest.mark.slow
@law
def test_what_is_stored_is_released_once_and_what_is_stale_at_once(played):
    """Conservation of KV: the ledger refuses a release of what is not there, and is empty in the end."""
    for event, actions, ledger in walk(played):
        released = [action.sample_id for action in actions if isinstance(action, ReleaseKv) and action.sample_id]
        if isinstance(event, ev.Tick):
            assert not [i for i in ledger.due if released.count(i) < ledger.due.count(i)]
        started = [action.sample_id for action in actions if isinstance(action, StartChunk)]
        for action in actions:
            if isinstance(action, ReleaseKv):
                assert action.reason and (action.sample_id is None or group_of(action.sample_id) == action.group_id)
                if action.cause is ReleaseCause.FULL:
                    running = {start.sample_id for start in ledger.running.values()}
                    assert action.sample_id not in running | set(started)


@law
def test_an_end_is_followed_by_the_release_of_its_kv_and_the_last_by_that_of_the_prompt(played):
    for _, actions, ledger in walk(played):
        ended, groups = set(), set(ledger.groups)
        for action, after in pairwise((*actions, None)):
            if isinstance(action, EndSample):
                ended.add(action.sample_id)
                follows = isinstance(after, ReleaseKv) and after.sample_id == action.sample_id
                assert follows or action.sample_id not in ledger.held
                assert not follows or action.sample_id in {*ledger.held, *ledger.due}
            if isinstance(after, ReleaseKv) and after.sample_id in ended:
                assert isinstance(action, EndSample) and action.sample_id == after.sample_id
        for before, action in pairwise((None, *actions)):
            if isinstance(action, EmitGroup):
                assert (isinstance(before, ReleaseKv) and before.sample_id is None) == (action.group_id in groups)
            if isinstance(before, ReleaseKv) and before.sample_id is None:
                assert isinstance(action, EmitGroup) and action.group_id == before.group_id


@law
def test_new_weights_stop_every_chunk_of_others_and_say_whether_its_kv_is_kept(played):
    """An update waits for one token, not for a chunk."""
    told, cancelled = set(), set()
    for event, actions, ledger in walk(played):
        if isinstance(event, ev.BatchCancelled):
            cancelled.add(event.batch_id)
        if isinstance(event, ev.SampleCancelled):
            cancelled.add(event.sample_id)
        for action in actions:
            if isinstance(action, AbortChunk):
                start = ledger.running[action.chunk_id]
                told.add(action.chunk_id)
                ended = bool(cancelled & {group_of(start.sample_id).partition(".")[0], start.sample_id})
                same = ledger.kv_version(start.sample_id, start.weights_version) == start.kv_version
                assert action.keep_kv == (same and not ended)
                moves = played.core.policies.lanes.on and action.reason.startswith("its lane is on")
                assert ended or moves or start.weights_version < ledger.version
        if isinstance(event, ev.Tick):
            assert not [i for i, s in ledger.running.items() if s.weights_version != ledger.version and i not in told]


@law
def test_a_full_pool_gives_up_what_is_needed_last_and_no_more_than_it_must(played):
    """Compared after every tick with the order worked out anew; a report from before the last time counts not."""
    assert played.evicted == []


@law
def test_a_prefetch_is_for_who_is_next_and_brings_kv_to_another_node_once(played):
    assert played.hasty == []
    for _, actions, ledger in walk(played):
        asked = set(ledger.asked)
        for action in actions:
            if isinstance(action, Prefetch):
                node = ledger.nodes[action.replica_id]
                assert ledger.held[action.sample_id][0] > 0 and node != ledger.last_node[action.sample_id]
                assert (action.sample_id, node) not in asked and action.reason
                asked.add((action.sample_id, node))
                running = {start.sample_id for start in ledger.running.values()}
                assert action.sample_id not in running


@law
def test_a_sample_whose_kv_is_lost_or_given_up_goes_on(played):
    """The pool is a cache: no sample fails for what it holds."""
    ends = played.actions(EndSample)
    assert {end.reason for end in ends if end.end is SampleEnd.FAILED} <= {"does not fit", "given up"}


@pytest.mark.parametrize("placement", ["least_kv", "round_robin", "cost_aware"])
def test_a_full_pool_and_prefetches_where_everybody_takes_turns(placement):
    """Three small replicas on two nodes, everything stored, and reports of a full pool, some of them old."""
    player = Player(policies_of("user_policies:FewestFirst", placement, 13), b"")
    for replica_id, node_id in (("a", "n1"), ("b", "n2"), ("c", "n2")):
        player.feed(ev.ReplicaJoined(0.0, replica_id, 16, 24, 2, 0, 0, node_id))
    groups = tuple(ev.GroupSpec(f"b1.{i}", 20 + i, 3, 60) for i in range(8))
    player.feed(ev.SamplesSubmitted(0.0, "b1", groups))
    player.tick()
    chance = Random(2)
    for number in range(1, 150):
        player.now = float(number)
        if number % 9 == 0:
            used_tokens, age_s = chance.choice((300, 541, 600)), chance.choice((0, 12))
            player.feed(ev.PoolReported(player.now, 600, used_tokens, player.now - age_s))
        if player.ledger.running:
            start = player.ledger.running[chance.choice(sorted(player.ledger.running))]
            end, context = chance.choice((*ev.ChunkEnd, ev.ChunkEnd.LENGTH)), player.kv.context_tokens(start.sample_id)
            made = (start.chunk_id, start.max_tokens, end, 0, context + start.max_tokens)
            player.feed(ev.ChunkFinished(player.now, *made))
        player.tick()
    played = player.play
    assert not (played.evicted or played.hasty or played.starved or played.stale)
    given_up = sum(action.cause is ReleaseCause.FULL for action in played.actions(ReleaseKv))
    fetched = [(prefetch.sample_id, prefetch.replica_id) for prefetch in played.actions(Prefetch)]
    assert given_up > 10 and len(fetched) > 5, "or the play has tried nothing"
    assert len(set(fetched)) < len(fetched), "who has run since may be brought to the same place again"
