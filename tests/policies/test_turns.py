"""Single stories of samples of several turns in the core: where they run next, their KV, their lengths, their ends."""

import pytest
from performances import performance
from test_kv_cases import of, stored
from test_rollout_cases import core_of, join, submit, tick

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies
from tailrace.policies.families.tail import Release
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import (
    EmitGroup,
    EndSample,
    EndTurn,
    ReleaseCause,
    ReleaseKv,
    SampleEnd,
    SetReplicas,
    StartChunk,
)
from tailrace.policies.protocol.events import IllegalEvent

HELD = ev.GroupSpec("g", 32, 1, 10, hold_s=60.0)


def returned(core: RolloutCore, sample_id="g#0", outside_tokens=20, max_tokens=10, hold_s=60.0, now=1.0) -> None:
    core.observe(ev.SampleReturned(now, sample_id, outside_tokens, max_tokens, hold_s))


def measured(core: RolloutCore, replica_id: str, chunk_s: float = 0.01) -> None:
    core.observe(ev.ReplicaMeasured(0.0, replica_id, performance(chunk=chunk_s)))


def one_turn(core: RolloutCore, spec: ev.GroupSpec = HELD, tokens: int = 42) -> StartChunk:
    """Submit a sample, run its first turn, and store so many tokens of its context."""
    submit(core, spec)
    (start,) = of(StartChunk, tick(core))
    stored(core, start, tokens)
    assert [type(action) for action in tick(core)] == [EndTurn] and core.counts()["held"] == 1
    return start


def test_a_turn_ends_and_the_next_one_continues_its_tokens_and_its_kv():
    core = core_of(r=20)
    one_turn(core)
    returned(core)
    (start,) = tick(core)
    assert (start.chunk_id, start.start, start.max_tokens) == ("g#0:1", 10, 10)
    assert core.replicas.view("r").kv_free_tokens == 20 * 16 - 80, "prompt 32, answers 20, a tool's 20"
    returned_again = ev.SampleReturned(1.0, "g#0", 0, 1)
    with pytest.raises(IllegalEvent, match="g#0 is running, not between two turns"):
        core.observe(returned_again)
    stored(core, start, 72)
    tick(core)
    returned(core, hold_s=0.0, outside_tokens=0)
    (start,) = tick(core)
    assert start.start == 20
    stored(core, start, 0, 4, "stop")
    end, kv, _, emit = tick(core)
    assert (end.end, kv.cause, type(emit)) == (SampleEnd.STOP, ReleaseCause.ENDED, EmitGroup)


def test_held_kv_is_released_at_its_time_and_not_before():
    core = core_of(r=20)
    one_turn(core)
    assert tick(core, now=59.0) == ()
    end, kv, prompt, emit = tick(core, now=60.0)
    assert (end.end, end.reason) == (SampleEnd.LENGTH, "no further turn in its time")
    assert (kv.sample_id, kv.cause, prompt.sample_id) == ("g#0", ReleaseCause.ENDED, None)
    assert core.sample("g#0") is None and isinstance(emit, EmitGroup)
    with pytest.raises(IllegalEvent, match="g#0' is not here"):
        returned(core)


@pytest.mark.parametrize("event", [ev.SampleCancelled(1.0, "g#0"), ev.BatchCancelled(1.0, "b")])
def test_a_held_sample_that_is_cancelled_ends_as_its_last_turn_did(event):
    core = core_of(r=20)
    one_turn(core)
    core.observe(event)
    end, kv, *_ = tick(core)
    assert (end.end, kv.cause) == (SampleEnd.LENGTH, ReleaseCause.ENDED)


def test_a_time_that_was_renewed_by_a_turn_counts_from_its_end():
    core = core_of(r=20)
    one_turn(core)
    returned(core, now=50.0)
    (start,) = tick(core, now=50.0)
    assert tick(core, now=70.0) == (), "its first time is over, and it runs"
    core.observe(ev.ChunkFinished(80.0, start.chunk_id, 10, ev.ChunkEnd.LENGTH, 0))
    assert of(EndTurn, tick(core, now=80.0))
    assert tick(core, now=139.0) == () and of(EndSample, tick(core, now=140.0))


def test_the_time_of_an_earlier_turn_ends_no_sample_that_is_held_anew():
    core = core_of(r=20)
    one_turn(core)
    returned(core, now=50.0)
    (start,) = tick(core, now=50.0)
    core.observe(ev.ChunkFinished(51.0, start.chunk_id, 10, ev.ChunkEnd.LENGTH, 0))
    assert of(EndTurn, tick(core, now=51.0))
    assert tick(core, now=60.0) == () == tick(core, now=110.0)
    assert of(EndSample, tick(core, now=111.0))


def test_the_next_turn_runs_where_the_kv_is_unless_the_load_says_that_a_move_pays():
    for busy, expected in ((0, "near"), (3, "far")):
        core = RolloutCore(Policies(placement="cost_aware", chunking={"type": "fixed", "chunk_tokens": None}))
        core.observe(join("near", 30))
        one_turn(core)
        core.observe(join("far", 40))
        for replica_id in ("near", "far"):
            measured(core, replica_id)
        for number in range(busy):  # all on the near one: the far one is closed to them by its weights
            core.observe(join("far", 40, version=1))
            submit(core, ev.GroupSpec(f"o{number}", 32, 1, 40), batch_id=f"other-{number}")
            (other,) = of(StartChunk, tick(core))
            assert other.replica_id == "near"
        core.observe(join("far", 40))
        measured(core, "far")
        returned(core)
        (start,) = of(StartChunk, tick(core))
        assert start.replica_id == expected, start.reason


def test_the_kv_of_held_samples_is_given_up_in_the_order_of_their_next_turns():
    """A full pool takes the sample that is needed last, held or waiting; the sample then goes on without."""
    core = core_of(r=40)
    submit(core, ev.GroupSpec("a", 32, 1, 10, hold_s=60.0), ev.GroupSpec("z", 32, 1, 10, hold_s=60.0))
    for start in of(StartChunk, tick(core)):
        stored(core, start, 42)
    core.observe(ev.PoolReported(1.0, 100, 95, 1.0))
    released = of(ReleaseKv, tick(core, now=1.0))
    assert [(kv.sample_id, kv.cause) for kv in released] == [("z#0", ReleaseCause.FULL), ("a#0", ReleaseCause.FULL)]
    returned(core, "z#0")
    assert [start.sample_id for start in of(StartChunk, tick(core, now=1.0))] == ["z#0"]


def test_new_weights_release_held_kv_at_once_or_keep_it():
    for kv_on_update, expected in (("fresh", ["g#0"]), ("keep", [])):
        core = RolloutCore(Policies(kv_on_update=kv_on_update))
        core.observe(join("r", 20))
        one_turn(core)
        core.observe(ev.WeightsChanged(1.0, 1))
        assert [kv.sample_id for kv in of(ReleaseKv, tick(core, now=1.0))] == expected
        core.observe(join("r", 20, version=1))
        returned(core)
        (start,) = of(StartChunk, tick(core, now=1.0))
        assert (start.weights_version, start.kv_version) == (1, 1 if expected else 0)


def test_kv_that_a_turn_stored_under_replaced_weights_is_released_as_the_sample_is_held():
    core = core_of(r=20)
    submit(core, HELD)
    (start,) = of(StartChunk, tick(core))
    core.observe(ev.WeightsChanged(0.0, 1))
    stored(core, start, 42)
    (kv,) = of(ReleaseKv, tick(core))
    assert (kv.sample_id, kv.cause) == ("g#0", ReleaseCause.STALE) and core.counts()["held"] == 1


def test_a_length_is_of_all_turns_and_mates_that_wait_are_expected_to_take_as_many():
    core = core_of(ordering="remaining_first", r=6)  # one at a time: 32 + 40 tokens and more
    core.observe(ev.SamplesSubmitted(0.0, "b", (ev.GroupSpec("g", 32, 3, 40, hold_s=60.0),)))
    (start,) = of(StartChunk, tick(core))
    stored(core, start, 0, 30, "stop")
    (mate,) = of(StartChunk, tick(core))
    group = core._buffer.samples["g#0"].group
    assert (mate.sample_id, group.expected_tokens) == ("g#1", 40)
    returned(core, outside_tokens=0, max_tokens=30, hold_s=0.0)
    assert group.expected_tokens == 60 and group.samples[2].expected_tokens == 60
    while mate.sample_id != "g#0":
        stored(core, mate, 0, 5, "stop")
        (mate,) = of(StartChunk, tick(core))
    stored(core, mate, 0, 20, "stop")
    tick(core)
    assert group.finished_lengths == (50,)


def test_replicas_stay_while_samples_are_held():
    """To a tail policy they wait: their KV is on these replicas, and they come back."""
    core = RolloutCore(Policies(tail=Release(after_s=0.0)), limits=Limits(1, 2))
    core.observe(join("r", 20))
    core.observe(join("s", 20))
    one_turn_start = ev.SamplesSubmitted(0.0, "b", (HELD,))
    core.observe(one_turn_start)
    (start,) = of(StartChunk, tick(core))
    stored(core, start, 42)
    asked = [action.replicas for now in range(1, 20) for action in of(SetReplicas, tick(core, now=float(now)))]
    assert 1 not in asked
    core.observe(ev.SampleCancelled(30.0, "g#0"))
    asked = [action.replicas for now in range(30, 40) for action in of(SetReplicas, tick(core, now=float(now)))]
    assert asked[-1] == 1
