"""Races at exactness `law`, where a copy may have other tokens than its original: no rule may favour the short."""

from random import Random
from statistics import mean

import pytest
from test_core_races import METHODS, RACING, core_of, finish, is_beaten, starts, stops

from tailrace.deployments.coordinator.core_holder import CoreHolder
from tailrace.deployments.coordinator.journal import JournaledCore, read_journal
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EndSample, SampleEnd, StartChunk

GROUPS, LONGEST = 150, 200


def at_law(samples=2, running=4, **more) -> tuple[RolloutCore, dict[str, StartChunk]]:
    return core_of(samples=samples, running=running, exactness="law", **more)


def stop_beaten(core: RolloutCore, now: float) -> None:
    for chunk_id in [name for name, chunk in core._running.chunks.items() if chunk.beaten]:
        finish(core, chunk_id, 0, ev.ChunkEnd.ABORTED, now)


def lengths_of(exactness: str, losses: float = 0.0) -> tuple[list[int], list[int]]:
    """Returns the lengths of all samples, and those of their own last chunks. Every chunk has an independent length,
    as after a token that has parted; a token takes a second wherever it is made. `losses`: chance that a replica is
    lost while a group runs.
    """
    rng = Random(7)
    policies = Policies(chunking={"type": "fixed", "chunk_tokens": None}, racing=RACING)
    core = RolloutCore(policies, 0, None, exactness)
    join = [ev.ReplicaJoined(0.0, f"r{index}", 16, 500, 4, 0, 0, "n", METHODS) for index in range(3)]
    for event in join:
        core.observe(event)
    counted, own, now = [], [], 0.0
    for number in range(GROUPS):
        core.observe(ev.SamplesSubmitted(now, f"b{number}", (ev.GroupSpec(f"g{number}", 10, 1, LONGEST),)))
        lost_s = now + rng.uniform(0, LONGEST) if rng.random() < losses else float("inf")
        ends: dict[str, tuple[float, int]] = {}  # by running chunk: its end and its length
        length_of_own = taken = None
        while core.knows_batch(f"b{number}"):
            for chunk_id, start in starts(core.decide(ev.Tick(now))).items():
                length = rng.randint(1, LONGEST)
                ends[chunk_id] = now + length, length
                if start.copy_of is None:
                    length_of_own, home = length, start.replica_id
            stop_beaten(core, now)
            ends = {chunk_id: end for chunk_id, end in ends.items() if core.is_running(chunk_id)}
            first = min(ends, key=ends.get, default=None)
            until_s = min(lost_s, ends[first][0] if first else now + 1.0)
            if until_s > now + 1.0 or first is None:
                now += 1.0  # a look at free room
                continue
            if lost_s < ends[first][0]:
                now, lost_s = max(now, lost_s), float("inf")
                core.observe(ev.ReplicaLeft(now, home, "spot"))
                core.observe(next(event for event in join if event.replica_id == home))
                continue
            now, length = ends.pop(first)
            event = ev.ChunkFinished(now, first, length, ev.ChunkEnd.STOP, 0)
            taken = length if core.counts_tokens(event) else taken
            core.observe(event)
        stop_beaten(core, now)
        counted.append(taken)
        own.append(length_of_own)
    return counted, own


def test_the_first_of_two_would_be_too_short():
    """Shows that the rule of `bits` is biased where lengths are independent: the mean of a minimum."""
    counted, own = lengths_of("bits")
    assert mean(counted) < 0.8 * mean(own)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [0.0, 0.7])
def test_every_sample_has_the_length_of_its_own_chunk_at_law(losses):
    counted, own = lengths_of("law", losses)
    assert counted == own and max(own) > 190
    assert losses or 90 < mean(own) < 112


def test_a_copy_that_ends_first_ends_nothing_and_is_not_started_again():
    core, started = at_law(samples=1)
    copies = {name for name, start in started.items() if start.copy_of}
    for copy in copies:
        finish(core, copy, 60, ev.ChunkEnd.STOP)
    for now in (2.0, 4.0, 6.0):
        actions = core.decide(ev.Tick(now))
        assert not stops(actions) and not [one for one in actions if isinstance(one, EndSample)]
        for name, start in starts(actions).items():
            assert start.method not in {started[copy].method for copy in copies}
            finish(core, name, 60, ev.ChunkEnd.STOP)
    finish(core, "g#0:0", 100)
    again = starts(core.decide(ev.Tick(7.0)))
    assert again["g#0:1"].start == 100 and [one for one in again.values() if one.copy_of], "the next chunk may race"


def test_copies_stop_with_their_original_and_when_it_is_lost():
    core, started = at_law()
    copies = {name for name, start in started.items() if start.sample_id == "g#0" and start.copy_of}
    finish(core, "g#0:0", 100)
    assert stops(core.decide(ev.Tick(1.0))) == copies and all(is_beaten(core, copy) for copy in copies)
    core, started = at_law(samples=1)
    copies = {name for name, start in started.items() if start.copy_of}
    core.observe(ev.ReplicaLeft(1.0, started["g#0:0"].replica_id, "spot"))
    actions = core.decide(ev.Tick(1.0))
    assert stops(actions) == copies - {name for name in copies if not core.is_running(name)} != set()
    assert [start.start for start in starts(actions).values() if not start.copy_of] == [0]


@pytest.mark.parametrize(("exactness", "ends"), [("bits", [SampleEnd.FAILED]), ("law", [])])
def test_a_refused_copy_ends_its_sample_only_where_it_has_the_same_tokens(exactness, ends):
    core, started = core_of(samples=1, exactness=exactness)
    copy = next(name for name, start in started.items() if start.copy_of)
    core.observe(ev.ChunkFailed(1.0, copy, "no token is left", of_sample=True))
    assert [one.end for one in core.decide(ev.Tick(1.0)) if isinstance(one, EndSample)] == ends


def test_the_next_core_and_a_journal_have_the_level():
    holder = CoreHolder(Policies(), lambda: 0.0)
    holder.set_exactness("law")
    holder.journal(True)
    holder.exchange(())
    assert isinstance(holder.present, JournaledCore)
    assert read_journal(holder.present.journal().splitlines()).exactness == "law"
    with pytest.raises(ValueError, match="header"):
        read_journal([holder.present.journal().replace('"law"', '"roughly"')])
