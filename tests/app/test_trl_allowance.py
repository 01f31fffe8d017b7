"""How far an asynchronous trainer's samples are ahead of it."""

import pytest

from tailrace.app.trl.allowance import Allowance


def allowance(**changes):
    return Allowance(**({"group": 4, "per_version": 8, "max_staleness": 1, "at_once": 8} | changes))


def test_the_rule_counts_groups_by_versions():
    book = allowance()
    assert book.groups(waiting=False) == 4
    book.taken = 16
    assert book.groups(waiting=True) == 0, "16 in hand"
    book.version = 1
    assert book.groups(waiting=False) == 2
    book.dropped = 4
    assert book.groups(waiting=False) == 3, "a dropped sample is replaced"


@pytest.mark.parametrize(("bounds", "groups"), [({"max_in_hand": 11}, 2), ({"max_in_flight": 4}, 1)])
def test_bounds_of_the_trainer_hold(bounds, groups):
    assert allowance(**bounds).groups(waiting=True) == groups


def test_a_trainer_that_waits_with_nothing_in_hand_gets_a_micro_batch():
    book = allowance(max_staleness=0, taken=8, queued=8, drawn=8)
    assert (book.groups(waiting=False), book.groups(waiting=True)) == (0, 2)
    book.taken = 12
    assert book.groups(waiting=True) == 0


def test_steps_of_unequal_sizes_are_estimated_by_their_mean():
    book = allowance(fixed=False, taken=40, queued=40, drawn=40, version=1)
    assert book.groups(waiting=False) == (3 * 20 - 40) // 4


@pytest.mark.parametrize("group", [3, 4, 16])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_trainer_that_draws_ahead_is_never_starved(group, max_staleness):
    """A trainer of accelerate: it draws the next micro-batch before it trains the present one.

    Where groups divide the samples of a step, and two versions may be under way, nothing is dropped.
    """
    book = allowance(group=group, max_staleness=max_staleness)
    queued: list[int] = []  # versions that samples were begun under
    for step in range(12):
        wanted = 2 * 8 if step == 0 else 8
        while wanted:
            groups = book.groups(waiting=not queued)
            assert groups or queued, f"starved at step {step}"
            queued += [book.version] * groups * group
            book.taken = book.queued = book.taken + groups * group
            stale = book.version - queued.pop(0) > max_staleness
            book.drawn += 1
            book.dropped += stale
            wanted -= not stale
        book.version += 1
    assert not book.dropped or (8 % group and max_staleness == 0)
