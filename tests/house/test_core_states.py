"""The table of a sample's states against the core: random plays show each change of state in it, and no other."""

from random import Random

import pytest
from rollout_machine import CHUNKS, KV_ON_UPDATE, TURNS, policies_of
from rollout_machine import play as played

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import TABLE, State
from tailrace.policies.core.scaling import Limits
from tailrace.policies.protocol import events as ev

PLAYS = 40
BYTES = 500
OPERATIONS = (*TURNS, *("hold",) * 3, *("cancel_one",) * 6, *("lose",) * 3)
"""With more of what is rare: samples of several turns, cancelled ones, lost replicas."""

CHANGES = {(row.state, row.event, row.then) for row in TABLE if row.state is not row.then}


def states_of(core: RolloutCore) -> dict[str, State]:
    return {sample.sample_id: sample.state for sample in core.samples()}


def changes_of(
    core: RolloutCore, event: ev.Event | ev.Tick, before: dict[str, State]
) -> tuple[set[tuple[State | None, str, State]], dict[str, State]]:
    """Feeds an event. Returns what it changed, and the states after it. A sample that is no longer in the buffer has
    ended.
    """
    core.decide(event) if isinstance(event, ev.Tick) else core.observe(event)
    after = states_of(core)
    ends = ((name, State.ENDED) for name in before.keys() - after.keys())
    moves = ((before.get(name), now) for name, now in (*after.items(), *ends))
    return {(was, type(event).__name__, now) for was, now in moves if was is not now}, after


@pytest.fixture(scope="module")
def seen() -> set:
    found = set()
    for number in range(PLAYS):
        policies = policies_of("fcfs", "least_kv", CHUNKS[number % len(CHUNKS)], KV_ON_UPDATE[number % 2])
        limits = Limits(1, 4) if number % 3 == 0 else None
        core, states = RolloutCore(policies, limits=limits), {}
        for event, _ in played(policies, Random(number).randbytes(BYTES), limits, OPERATIONS).steps:
            changes, states = changes_of(core, event, states)
            found |= changes
    return found


def test_no_change_is_missing_in_the_table(seen):
    assert seen - CHANGES == set()


def test_each_change_of_the_table_happens(seen):
    assert CHANGES - seen == set()
