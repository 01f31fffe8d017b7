"""How far an asynchronous trainer's samples are ahead of it."""

from random import Random

import pytest

from tailrace.app.trl.allowance import Allowance


def allowance(**changes):
    return Allowance(**({"group": 4, "per_version": 8, "max_staleness": 1, "at_once": 8} | changes))


def test_the_rule_counts_groups_by_versions():
    book = allowance()
    assert book.groups(waiting=False) == 4
    book.begun = 4
    assert book.groups(waiting=True) == 0, "16 in hand"
    book.version = 1
    assert book.groups(waiting=False) == 2
    book.dropped = 4
    assert book.groups(waiting=False) == 3, "a dropped sample is replaced"


@pytest.mark.parametrize(("bounds", "groups"), [({"max_in_hand": 11}, 2), ({"max_in_flight": 4}, 1)])
def test_bounds_of_the_trainer_hold(bounds, groups):
    assert allowance(**bounds).groups(waiting=True) == groups


def test_a_trainer_that_waits_with_nothing_in_hand_gets_a_micro_batch():
    book = allowance(max_staleness=0, begun=2, ended=2, queued=8, drawn=8)
    assert (book.groups(waiting=False), book.groups(waiting=True)) == (0, 2)
    book.begun = 3
    assert book.groups(waiting=True) == 0


def test_steps_of_unequal_sizes_are_estimated_by_their_mean():
    book = allowance(fixed=False, begun=10, ended=10, queued=40, drawn=40, version=1)
    assert book.groups(waiting=False) == (3 * 20 - 40) // 4


def test_groups_of_unequal_sizes_are_estimated_by_their_mean():
    book = allowance(branches=True)
    assert book.groups(waiting=False) == 2, "groups of one version, until one has ended"
    book.begun = 2
    assert book.groups(waiting=False) == 0
    book.begun = 4
    book.end(12)  # each trajectory has had two branches
    assert book.in_flight == 12, "trajectories, not their branches"
    book.version = 3
    assert book.groups(waiting=False) == 0, "48 are expected, where 40 are wanted"
    book.version = 5
    assert book.groups(waiting=False) == 1, "56 are wanted"
    book.end(0)
    assert book.groups(waiting=False) == 6, "56 less 12 and two groups of 6: 32"


def test_a_group_that_is_larger_than_the_queue_is_begun_once_nothing_is_in_hand():
    book = allowance(max_in_hand=5, begun=1, ended=1, queued=9, drawn=9)
    assert book.groups(waiting=False) == 1
    book.begun = 2
    assert book.groups(waiting=False) == 0


@pytest.mark.parametrize("group", [3, 4, 16])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (0.25, 2.0)])
def test_a_trainer_that_draws_ahead_is_never_starved(group, max_staleness, sizes):
    """A trainer of accelerate: it draws the next micro-batch before it trains the present one. `sizes`: the least and
    the greatest number of samples for each that a group is begun for.

    Where groups divide the samples of a step, and two versions may be under way, nothing is dropped.
    """
    branches = sizes != (1.0, 1.0)
    book, chance = allowance(group=group, max_staleness=max_staleness, branches=branches), Random(7)
    queued: list[int] = []  # versions that samples were begun under
    for step in range(12):
        wanted = 2 * 8 if step == 0 else 8
        while wanted:
            groups = book.groups(waiting=not queued)
            assert groups or queued, f"starved at step {step}"
            book.begun += groups
            for _ in range(groups):
                samples = max(1, round(group * chance.uniform(*sizes)))
                book.end(samples)
                queued += [book.version] * samples
            stale = book.version - queued.pop(0) > max_staleness
            book.drawn += 1
            book.dropped += stale
            wanted -= not stale
        book.version += 1
    assert not book.dropped or (8 % group and max_staleness == 0) or branches
