"""The laws of the rollout core, each over random plays of every ordering x placement x chunking.

Every test walks the events and actions of a play by itself; none trusts the core's own books.
"""

import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from kv_ledger import begun_tokens, group_of, new_samples
from rollout_machine import (
    CHUNKS,
    FAIRNESS,
    KV_ON_UPDATE,
    LANES,
    ORDERINGS,
    PLACEMENTS,
    TURNS,
    Ledger,
    Play,
    digest,
    play,
    policies_of,
    replay,
)

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol import views
from tailrace.policies.protocol.actions import AbortChunk, EmitGroup, EndSample, EndTurn, SampleEnd, StartChunk
from tailrace.policies.protocol.events import IllegalEvent

COMBINATIONS = [*product(ORDERINGS, PLACEMENTS)]
PROFILE = settings(max_examples=12, deadline=None, database=None)


@cache
def played_by(ordering: str, placement: str, data: bytes) -> Play:
    """The first two bytes choose chunking, fairness, lanes and KV on updates; the others are the play."""
    chunk_tokens, kv_on_update = CHUNKS[data[0] % len(CHUNKS)], KV_ON_UPDATE[data[1] % len(KV_ON_UPDATE)]
    fairness, lanes = FAIRNESS[data[0] // len(CHUNKS) % len(FAIRNESS)], LANES[data[1] // len(KV_ON_UPDATE) % len(LANES)]
    policies = policies_of(ordering, placement, chunk_tokens, kv_on_update, fairness, lanes)
    return play(policies, data[2:], operations=TURNS)


def law(test):
    """Run `test` on plays of every combination of policies. One seed: the same plays for each law, made once."""

    @seed(0)
    @PROFILE
    @given(data=st.binary(min_size=300, max_size=300))
    def run(data):
        for turn, names in enumerate(COMBINATIONS):
            try:
                test(played_by(*names, data[15 * turn :] + data[: 15 * turn]))
            except Exception as error:  # whatever is wrong: with whom
                error.add_note(" and ".join(names))
                raise

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def walk(played):
    """Every event, its actions, and the ledger before the two took effect."""
    ledger = Ledger()
    for event, actions in played.steps:
        yield event, actions, ledger
        ledger.note(event, actions)


@law
def test_every_sample_ends_once_and_every_group_is_handed_out_once_after_its_samples(played):
    """Law 1, conservation: of samples and groups."""
    submitted = [event for event, _ in played.steps if isinstance(event, ev.SamplesSubmitted)]
    groups = {(event.batch_id, spec.group_id) for event in submitted for spec in event.groups}
    open_samples, known = defaultdict(set), {}
    for event, actions in played.steps:
        if isinstance(event, ev.SamplesSubmitted):
            for sample_id in new_samples(event, known):
                open_samples[group_of(sample_id)].add(sample_id)
        for action in actions:
            if isinstance(action, EndSample):
                open_samples[group_of(action.sample_id)].remove(action.sample_id)
                assert (action.error is not None) == (action.end is SampleEnd.FAILED) and action.reason
            elif isinstance(action, EmitGroup):
                assert not open_samples[action.group_id]
            elif isinstance(action, StartChunk):
                assert action.sample_id in open_samples[group_of(action.sample_id)]
    emitted = [(action.batch_id, action.group_id) for action in played.actions(EmitGroup)]
    assert sorted(emitted) == sorted(groups)
    assert len(played.actions(EndSample)) == sum(known.values())


@law
def test_tokens_only_grow_and_never_beyond_the_sample_s_own_bound(played):
    """Law 1, conservation: of tokens. `max_tokens` is the sample's, over all its chunks."""
    tokens = defaultdict(int)
    for event, actions, ledger in walk(played):
        if isinstance(event, ev.SamplesSubmitted):
            tokens |= begun_tokens(event)
        if isinstance(event, ev.ChunkFinished):
            tokens[ledger.running[event.chunk_id].sample_id] += event.new_tokens
        for action in actions:
            if isinstance(action, StartChunk):
                assert action.start == tokens[action.sample_id]
                assert 1 <= action.max_tokens <= ledger.specs[action.sample_id].max_tokens - action.start
                assert not any(start.sample_id == action.sample_id for start in ledger.running.values())
            if isinstance(action, EndSample) and action.end is SampleEnd.LENGTH and "sample" in action.reason:
                assert tokens[action.sample_id] == ledger.specs[action.sample_id].max_tokens


@law
def test_nothing_is_left_when_everything_has_run_out(played):
    """Law 1, conservation: of memory. A service that runs for weeks may keep nothing of what has ended."""
    core = played.core
    assert core.counts() == {"waiting": 0, "running": 0, "held": 0, "batches": 0}
    assert not (
        core._buffer.batches or core._buffer.samples or core._running.chunks or core._outbox or core._unassigned
    )
    assert not (core._kv._held or core._kv._groups or core._held or core._held._due)
    assert not len(core._waiting) and not core._waiting._lengths
    assert not (core._lanes._truth or core._lanes._levels or core._lanes._batch)
    sets = [queues for batches in core._waiting._queues.values() for queues in batches.values()]
    assert not any(queue._live for queues in sets for queue in queues)
    for view in core.replicas.views():
        assert (view.running, view.kv_free_tokens) == (0, view.kv_capacity_tokens)


@law
def test_the_chunks_of_a_sample_tile_its_answer(played):
    """Law 2, exactness, as far as the core goes: each position is asked for, and counted, exactly once."""
    pieces, ends, begun = defaultdict(list), {}, {}
    for event, actions, ledger in walk(played):
        if isinstance(event, ev.SamplesSubmitted):
            begun |= begun_tokens(event)
        if isinstance(event, ev.ChunkFinished):
            start = ledger.running[event.chunk_id]
            pieces[start.sample_id].append((start.start, start.start + event.new_tokens))
            ends[start.sample_id] = start.start + event.new_tokens
        chunk_ids = [action.chunk_id for action in actions if isinstance(action, StartChunk)]
        assert not set(chunk_ids) & set(ledger.running) and len(set(chunk_ids)) == len(chunk_ids)
    for sample_id, parts in pieces.items():
        first = begun.get(sample_id, 0)
        assert [begin for begin, _ in parts] == [first] + [end for _, end in parts[:-1]]
        assert parts[-1][1] == ends[sample_id] == first + sum(end - begin for begin, end in parts)


def test_no_view_has_a_field_for_a_true_length():
    """Law 3, oracle boundary: a new field of a view is looked at here before a policy may see it."""
    named = {name: cls._fields for name, cls in vars(views).items() if hasattr(cls, "_fields")}
    assert named == {
        "SampleView": (
            "sample_id", "group_id", "arrival", "index", "prompt_tokens", "generated_tokens", "streamed_tokens",
            "observed_at", "max_tokens", "chunks", "last_replica", "stored_tokens", "expected_tokens",
        ),
        "PromptView": ("group_id", "prompt_tokens", "samples", "past_lengths"),
        "GroupView": (
            "group_id", "arrival", "samples", "running", "finished", "chunks", "max_tokens", "expected_tokens",
        ),
        "BatchView": ("batch_id", "priority", "share", "running_tokens"),
        "LengthsView": ("finished", "running", "history", "batch", "max_tokens"),
        "BatchLengths": ("answers", "mean_log", "spread_log", "between_share", "classes"),
        "ReplicaView": (
            "replica_id", "kv_capacity_tokens", "kv_free_tokens", "running", "max_running", "weights_version",
            "node_id", "performance",
        ),
        "BeliefView": (
            "level_mean", "level_variance", "finished", "finished_group", "group", "made", "max_tokens",
        ),
        "LaneReplica": ("kv_tokens", "max_running", "performance"),
        "LanesView": (
            "now", "left", "left_high", "drawn", "context", "replica", "replicas", "chance", "max_drafts",
            "told", "reserved_tokens",
        ),
        "RacesView": ("room", "copies", "gain"),
        "TailView": (
            "now", "waiting", "running", "unended", "submitted", "replicas", "min_replicas", "max_replicas", "races",
            "roles", "left_tokens", "move_s",
        ),
        "RolesView": ("engines", "drafters", "gain"),
        "TrajectoryLoad": ("active", "context_tokens", "growth_tokens", "capacity_tokens"),
        "DraftModelsView": ("verified", "drafted", "acceptance", "performance"),
        "DraftView": (
            "right", "proposed", "match_tokens", "slot", "verifications", "drafted_last", "accepted_last", "generated",
            "expected", "medium_at", "long_at", "acceptance", "cost",
        ),
    }  # fmt: skip
    lookups = {name for name in vars(views.ReplicasView) if not name.startswith("_")}
    assert lookups == {"next_with_room", "ready", "room_tokens", "roomiest", "running", "performance"}


@pytest.mark.parametrize("ordering", ORDERINGS)
def test_lengths_are_for_the_oracle_alone_and_it_is_refused_without_them(ordering):
    """Law 3, oracle boundary."""
    core = RolloutCore(policies_of(ordering, "least_kv", None))
    submit = ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 10, 2, 10),))
    if ordering != "oracle_longest_first":
        with pytest.raises(IllegalEvent, match="must not see true lengths"):
            core.observe(ev.LengthsRevealed(0.0, {"g#0": 1, "g#1": 2}))
        core.observe(submit)
        return
    core.observe(ev.LengthsRevealed(0.0, {"g#0": 1}))
    with pytest.raises(IllegalEvent, match="needs true lengths"):
        core.observe(submit)
    core.observe(ev.LengthsRevealed(0.0, {"g#1": 2}))
    core.observe(submit)


@pytest.mark.slow
@law
def test_the_same_events_give_the_same_actions(played):
    """Law 4, determinism: byte for byte."""
    assert repr(replay(played.core.policies, played.steps)) == repr([actions for _, actions in played.steps])


@pytest.mark.slow
def test_another_process_with_another_hash_seed_gives_the_same_actions():
    """Law 4, determinism: nothing follows the order of a set of strings."""
    here, code = Path(__file__).parents[1], "import rollout_machine; print(rollout_machine.digest())"
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == digest()


@law
def test_reserved_kv_never_exceeds_a_replica(played):
    """Law 5, no preemption: running chunks at their full length, and no more of them than the replica takes."""
    for _, actions, ledger in walk(played):
        after = defaultdict(list)
        for replica_id, books in ledger.replicas.items():
            after[replica_id] += books.blocks.values()
        for action in actions:
            if isinstance(action, StartChunk):
                join = ledger.replicas[action.replica_id].join
                context = ledger.specs[action.sample_id].prompt_tokens + action.start
                tokens = context + action.max_tokens + join.draft_tokens
                after[action.replica_id].append(-(-tokens // join.block_tokens))
        for replica_id, blocks in after.items():
            join = ledger.replicas[replica_id].join
            assert sum(blocks) <= join.kv_capacity_blocks and len(blocks) <= join.max_running


@law
def test_a_turn_ends_where_it_may_and_its_sample_returns_or_ends_once(played):
    """Between two turns a sample has no chunk, and it ends as its last turn did when its time is over."""
    held, hold_s = {}, {}
    for event, actions, ledger in walk(played):
        if isinstance(event, ev.SamplesSubmitted):
            hold_s |= {i: spec.hold_s for i, spec in new_samples(event, dict(ledger.known)).items()}
        if isinstance(event, ev.SampleReturned):
            del held[event.sample_id]
            hold_s[event.sample_id] = event.hold_s
        for action in actions:
            if isinstance(action, EndTurn):
                assert action.end in (SampleEnd.STOP, SampleEnd.LENGTH) and action.reason
                assert action.sample_id not in {start.sample_id for start in ledger.running.values()}
                held[action.sample_id] = event.now + hold_s[action.sample_id], action.end
            elif isinstance(action, StartChunk):
                assert action.sample_id not in held
            elif isinstance(action, EndSample) and action.sample_id in held:
                assert action.end is held.pop(action.sample_id)[1] and "no further turn" in action.reason
        if isinstance(event, ev.Tick):
            assert not [until_s for until_s, _ in held.values() if until_s < event.now - 1.0]
    assert not held


@law
def test_chunks_start_only_under_the_current_weights(played):
    """Law 6, version: on a replica that joined last with it, and the chunk carries it."""
    for _, actions, ledger in walk(played):
        for action in actions:
            if isinstance(action, StartChunk):
                assert action.weights_version == ledger.version == ledger.replicas[action.replica_id].version


def test_tokens_of_other_weights_are_refused():
    """Law 6, version: a chunk ends under the weights it started with, also when others are current by then."""
    core = RolloutCore(policies_of("fcfs", "least_kv", 10))
    core.observe(ev.ReplicaJoined(0.0, "r", 16, 10, 1, 0, 0))
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 1, 1, 30),)))
    (start,) = core.decide(ev.Tick(0.0))
    core.observe(ev.WeightsChanged(1.0, 1))
    core.observe(ev.ReplicaJoined(1.0, "r", 16, 10, 1, 0, 1))
    with pytest.raises(IllegalEvent, match="made by weights 1, started under 0"):
        core.observe(ev.ChunkFinished(1.0, start.chunk_id, 10, ev.ChunkEnd.LENGTH, 1))
    core.observe(ev.ChunkFinished(1.0, start.chunk_id, 10, ev.ChunkEnd.LENGTH, 0))
    (after,) = core.decide(ev.Tick(1.0))
    assert (after.start, after.weights_version) == (10, 1)


@law
def test_nobody_waits_beside_room(played):
    """Law 7, liveness: by brute force after every decision."""
    assert played.starved == []


@law
def test_lanes_leave_no_replica_idle_beside_a_sample_that_waits(played):
    """Law 7, liveness: a sample with a lane waits for that replica alone, so its lane changes once another is idle."""
    assert played.idle == []


@law
def test_who_is_told_that_it_does_not_fit_was_told_the_truth(played):
    """Law 7, liveness: nobody is given up whom a replica open to it could have taken."""
    tokens = defaultdict(int)
    policies = played.core.policies
    free = policies.ordering.type != "group_static" and policies.placement.type != "pinned"
    for event, actions, ledger in walk(played):
        if isinstance(event, ev.SamplesSubmitted):
            tokens |= begun_tokens(event)
        if isinstance(event, ev.ChunkFinished):
            tokens[ledger.running[event.chunk_id].sample_id] += event.new_tokens
        for action in actions:
            if isinstance(action, EndSample) and action.reason == "does not fit":
                spec, done = ledger.specs[action.sample_id], tokens[action.sample_id]
                chunk = min(policies.chunking.chunk_tokens or spec.max_tokens, spec.max_tokens - done)
                rooms = [books.room_tokens() for books in ledger.replicas.values()]
                assert spec.prompt_tokens + done + chunk > (max(rooms) if free else min(rooms)), action
                assert str(spec.prompt_tokens + done + chunk) in action.error


@law
def test_a_view_says_when_its_streamed_tokens_were_seen(played):
    """Law 8, freshness: the newest report counts, with its own time; one that comes late does not make it older."""
    assert played.stale == []


@law
def test_illegal_events_raise_and_change_nothing(played):
    """An event that cannot have happened is refused, and the core is byte for byte what it was."""
    assert played.changed == []


@law
def test_only_running_chunks_are_aborted_and_only_once(played):
    """An abort's `ChunkFinished` still has to come, so a chunk that has ended or was lost is not aborted."""
    aborted = set()
    for _, actions, ledger in walk(played):
        for action in actions:
            if isinstance(action, AbortChunk):
                assert ledger.running[action.chunk_id].replica_id == action.replica_id
                assert action.chunk_id not in aborted
                aborted.add(action.chunk_id)
