"""HistoPipe: what every assignment and every plan of workers keeps, over random cases, and what the rules mean."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.lab.research.histopipe.policy import HistoPipeline, Prompt, in_order, rank
from tailrace.policies.models.outlier_rule import beta
from tailrace.policies.models.tiers import flattest, plan_tiers

lengths = st.lists(st.integers(1, 1000), min_size=1, max_size=3).map(tuple)
prompts = st.lists(st.lists(lengths, max_size=2).map(tuple), min_size=1, max_size=40).map(
    lambda pasts: [Prompt(f"p{i}", past) for i, past in enumerate(pasts)]
)


def by_longest(group, workers: int) -> float:
    return sum(max(prompt.past[0], default=1) if prompt.past else 1 for prompt in group) / workers


def mean_of(ranked, at) -> float:
    tokens = [sum(at[prompt_id].past[0]) / len(at[prompt_id].past[0]) for share in ranked.shares for prompt_id in share]
    return sum(tokens) / len(tokens)


@settings(max_examples=60)
@given(prompts, st.integers(1, 12), st.integers(0, 3), st.booleans(), st.integers(1, 6))
def test_each_prompt_is_assigned_once_and_each_worker_is_used_where_there_is_work(
    given, workers, step, two_tier, ranks
):
    policy = HistoPipeline(two_tier=two_tier, ranking_groups=ranks)
    groups = policy.assign(given, workers, step, by_longest, 0.0)
    assert sorted(worker for group in groups for worker in group.workers) == list(range(workers))
    shares = [share for group in groups for share in group.shares]
    assert sorted(prompt_id for share in shares for prompt_id in share) == sorted(prompt.prompt_id for prompt in given)
    assert all(len(group.workers) == len(group.shares) for group in groups)
    if len(given) >= workers:
        assert all(shares), "a worker has nothing to do"
    else:
        assert max(map(len, shares)) == 1
    assert policy.assign(list(reversed(given)), workers, step, by_longest, 0.0) == groups or not any(
        prompt.past for prompt in given
    ), "the order of prompts with ranks changes nothing"


def known(n: int) -> list[Prompt]:
    return [Prompt(f"p{i:02}", ((10 * (i + 1),) * 3, (8 * (i + 1),) * 3)) for i in range(n)]


def test_ranks_rise_and_the_order_of_workers_alternates():
    given, at = known(24), {prompt.prompt_id: prompt for prompt in known(24)}
    odd, even = (HistoPipeline(two_tier=False).assign(given, 8, step, by_longest, 0.0) for step in (1, 2))
    assert [mean_of(group, at) for group in odd] == sorted(mean_of(group, at) for group in odd)
    assert [group.workers for group in odd] == [(i,) for i in range(8)]
    assert [group.workers for group in even] == [(7 - i,) for i in range(8)]
    assert [group.shares for group in odd] == [group.shares for group in even]
    fixed = [HistoPipeline(two_tier=False, alternate=False).assign(given, 8, step, by_longest, 0.0) for step in (1, 2)]
    assert fixed[0] == fixed[1]
    for worker in range(8):  # what is long now is short next: both together are the same for all
        both = [group for groups in (odd, even) for group in groups if worker in group.workers]
        assert sum(mean_of(group, at) for group in both) == pytest.approx(250)


def test_without_history_prompts_go_out_in_order_and_nothing_moves():
    groups = HistoPipeline().assign([Prompt("b"), Prompt("a"), Prompt("c")], 2, 1, by_longest, 0.0)
    assert groups == in_order([Prompt("b"), Prompt("a"), Prompt("c")], 2)
    assert [group.shares for group in groups] == [(("b",), ("a", "c"))]
    assert groups[0].outlier_tokens is None


def test_a_prompt_without_history_ranks_in_the_middle():
    assert [prompt.prompt_id for prompt in rank([*known(3), Prompt("new")])] == ["p00", "new", "p01", "p02"]


def test_outliers_are_past_the_groups_longest_answer_by_the_growth_of_the_last_epoch():
    assert beta([prompt.past for prompt in known(8)], 1.1) == pytest.approx(1.25)
    assert beta([((30,),)], 1.1) == 1.1, "with one epoch there is no growth yet"
    assert beta([((10,), (20,))] * 4, 1.1) == 1.1
    groups = HistoPipeline(two_tier=False).assign(known(8), 4, 1, by_longest, 0.0)
    assert [group.outlier_tokens for group in groups] == pytest.approx([25, 50, 75, 100])


def test_only_the_last_tenth_moves_within_the_step_from_short_groups_and_on_from_long_ones():
    policy = HistoPipeline()
    assert policy.migration(0, 8, 11, 100) == "stay"
    assert [policy.migration(r, 8, 10, 100) for r in range(8)] == ["within"] * 4 + ["next"] * 4
    assert HistoPipeline(last_share=0.0).migration(0, 8, 1, 100) == "stay"


@settings(max_examples=150)
@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=8), st.floats(0, 0.5), st.integers(0, 30), st.floats(0, 2e4))
def test_a_plan_uses_every_worker_and_no_better_line_is_feasible(work, tail, more, train_s):
    work, workers = sorted(work), len(work) + more
    times = [lambda k, w=w: w * (tail + (1 - tail) / k) for w in work]
    counts = plan_tiers(times, [100] * len(work), workers, train_s)
    assert sum(counts) == workers and min(counts) >= 1
    fewest = flattest(times, workers, train_s)
    assert sum(fewest) <= workers
    if len(work) == 1:
        return
    ends_s = {}
    for first in range(1, workers // len(work) + 1):
        start_s = max(times[0](first), train_s)
        late_s = [(time_s(k) - start_s) / i for i, (time_s, k) in enumerate(zip(times, fewest, strict=True)) if i]
        if times[0](fewest[0]) <= start_s:
            ends_s[first] = 2 * start_s + max(0.0, *late_s) * (len(work) - 1)
    for first in range(1, workers // len(work) + 1):  # a line whose ends sum up to 1 % less needs too many workers
        start_s = max(times[0](first), train_s)
        slope_s = (0.99 * min(ends_s.values()) - 2 * start_s) / (len(work) - 1)
        targets = [start_s + i * slope_s for i in range(len(work))]
        needed = [
            next((k for k in range(1, workers + 1) if time_s(k) <= target), workers + 1)
            for time_s, target in zip(times, targets, strict=True)
        ]
        assert slope_s < 0 or sum(needed) > workers


def test_times_become_a_line_where_long_groups_get_more_workers():
    times = [lambda k, i=i: 100 * 1.6**i / k for i in range(6)]
    counts = plan_tiers(times, [100] * 6, 48, 0.0)
    assert counts == sorted(counts) and sum(counts) == 48
    equal = [time_s(8) for time_s in times]
    planned = [time_s(k) for time_s, k in zip(times, counts, strict=True)]
    assert max(planned) < max(equal)
    assert max(later - before for before, later in pairwise(planned)) < equal[-1] - equal[-2]


def test_a_group_gets_no_more_workers_than_prompts_while_another_can_use_them():
    counts = plan_tiers([lambda k: 1.0, lambda k: 1e6 / k], [10, 2], 8, 0.0)
    assert counts == [6, 2]
    with pytest.raises(ValueError, match="cannot serve"):
        plan_tiers([lambda k: 1.0] * 3, [1] * 3, 2, 0.0)
