"""Groups trained on as they end: whole, once each, within the bound, and long answers as often as short ones."""

from heapq import heappop, heappush
from random import Random
from statistics import mean

import pytest
from first_ended import FirstEnded

from tailrace.policies.models.group_turns import GroupTurns

SIZE, STEPS = 8, 40


def played(seed: int, ahead: int, turns: type[GroupTurns] = GroupTurns) -> tuple[list[int], list[list[int]], list[int]]:
    """Trains on 40 steps of 8 groups, whose rollout takes as long as their length. Returns the lengths in order of
    admission, those of each step, and the updates between admission and use of each group.
    """
    rng = Random(seed)
    lengths = [rng.choice((1, 2, 3, 40)) for _ in range(SIZE * STEPS)]
    book, steps, ages = turns(SIZE, ahead), [[]], []
    running, ended, admitted_at, now, next_group = [], set(), {}, 0.0, 0
    while len(steps) <= STEPS:
        while book.room > 0 and next_group < len(lengths):
            book.admit(next_group)
            admitted_at[next_group] = book.version
            heappush(running, (now + lengths[next_group], next_group))
            next_group += 1
        while (group := book.take(ended)) is not None:
            ended.discard(group)
            steps[-1].append(lengths[group])
            ages.append(book.version - admitted_at[group])
        if book.taken == SIZE:
            book.end_step()
            steps.append([])
        elif book.room <= 0 or next_group == len(lengths):
            now, group = heappop(running)
            ended.add(group)
    return lengths, steps[:-1], ages


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_every_group_is_trained_on_once_and_within_the_bound(ahead):
    for seed in range(20):
        lengths, steps, ages = played(seed, ahead)
        assert sorted(length for step in steps for length in step) == sorted(lengths)
        assert {len(step) for step in steps} == {SIZE} and max(ages) <= ahead


def test_lengths_that_are_trained_on_are_those_of_all_samples_at_any_time():
    """Long groups come a step or two later, and so do those before them: the first quarter of the run is left out."""
    found = [played(seed, 2) for seed in range(30)]
    trained = mean(length for _, steps, _ in found for step in steps[10:30] for length in step)
    everything = mean(length for lengths, _, _ in found for length in lengths)
    assert trained == pytest.approx(everything, rel=0.05)


def test_without_the_bound_short_groups_would_come_first():
    found = [played(seed, 2, FirstEnded) for seed in range(30)]
    early = mean(length for _, steps, _ in found for step in steps[:10] for length in step)
    everything = mean(length for lengths, _, _ in found for length in lengths)
    assert early < 0.9 * everything
    assert max(max(ages) for _, _, ages in found) > 2


def test_a_group_overtakes_only_while_the_steps_left_can_hold_those_before_it():
    book = GroupTurns(2, 2)  # three are admitted, two to a step
    for group in "abc":
        book.admit(group)
    assert book.room == 0 and book.take({"c"}) == "c" and book.take({"c"}) is None
    assert book.room == 1, "what is taken makes room for one"
    assert book.take({"a", "b"}) == "a" and book.take({"b"}) is None, "a step takes no more"
    book.end_step()
    for group in "de":
        book.admit(group)
    assert [book.take({"d", "e"}) for _ in range(2)] == ["d", "e"]
    book.end_step()
    for group in "fg":
        book.admit(group)
    assert book.take({"f"}) == "f", "one place is left for b, which is due now"
    assert book.take({"g"}) is None and book.take({"g", "b"}) == "b"


def test_a_step_without_its_groups_does_not_end():
    book = GroupTurns(1, 1)
    with pytest.raises(ValueError, match="0 of 1 groups"):
        book.end_step()
