"""HistoPipe as an ordering: ranks, turns, tiers, and the core that binds by it."""

import pytest
from performances import performance
from test_rollout_cases import join, submit, tick

from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.histo_pipe import HistoPipe, group_s, ranked
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.views import PromptView, ReplicaView

MEASURED = performance(1e4, 0.0, 0.0, 0.01, 1e-4)


def replicas(count: int) -> list[ReplicaView]:
    return [
        ReplicaView(f"r{n}", kv_capacity_tokens=1 << 30, kv_free_tokens=1 << 30, running=0, max_running=64,
                    weights_version=0, performance=MEASURED) for n in range(count)
    ]  # fmt: skip


def prompts(*medians: int | None) -> list[PromptView]:
    """Each with three answers about its median, the longest far above; without a median no history."""
    return [
        PromptView(f"g{n}", 10, 3, () if median is None else ((median, max(1, median - 5), 40 * median), (1, 1, 1)))
        for n, median in enumerate(medians)
    ]


def lengths_by_replica(homes: list[str], views: list[PromptView]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for home, view in zip(homes, views, strict=True):
        found.setdefault(home, []).append(sorted(view.past_lengths[0])[1])
    return found


def test_prompts_rank_by_the_median_of_their_last_epoch():
    views = prompts(300, 100, None, 200)
    assert ranked(views) == [1, 2, 3, 0] or ranked(views) == [1, 3, 2, 0]
    assert ranked(prompts(7, 7, 7)) == [0, 1, 2]


@pytest.mark.parametrize("two_tier", [False, True])
def test_odd_steps_rise_over_the_replicas_and_even_ones_fall(two_tier):
    views = prompts(*(10 * n for n in (5, 3, 8, 1, 7, 2, 6, 4)))
    policy = HistoPipe(ranking_groups=4, two_tier=two_tier)
    for step in (1, 2, 3, 4):
        found = lengths_by_replica(policy.homes(views, step, replicas(4)), views)
        levels = [max(found[f"r{n}"]) for n in range(4)]
        assert levels == sorted(levels, reverse=step % 2 == 0), step
        assert len(set(levels)) > 1


def test_without_turns_each_step_is_the_same():
    views, policy = prompts(1, 2, 3, 4), HistoPipe(alternate=False)
    assert policy.homes(views, 1, replicas(4)) == policy.homes(views, 2, replicas(4))


def test_long_groups_get_more_replicas_all_are_used_and_the_times_rise_in_a_line():
    views = prompts(*[10] * 12, *[20] * 12, *[40] * 12, *[400] * 12)
    fleet = replicas(12)
    homes = HistoPipe(ranking_groups=4).homes(views, 1, fleet)
    seats = [len({home for home, view in zip(homes, views, strict=True) if view.past_lengths[0][0] == median})
             for median in (10, 20, 40, 400)]  # fmt: skip
    assert sum(seats) == 12 and seats == sorted(seats) and seats[-1] > seats[0]
    assert set(homes) == {replica.replica_id for replica in fleet}


def test_a_group_with_one_replica_takes_longer_than_with_two_and_never_less_than_its_longest_answer():
    views, fleet = prompts(10, 20, 30), replicas(4)
    one, two = group_s(views, fleet, 1), group_s(views, fleet, 2)
    assert one > two > 0.01 * 40 * 30


def test_without_history_the_batch_is_cut_in_the_order_given():
    homes = HistoPipe().homes(prompts(None, None, None, None), 1, replicas(2))
    assert homes == ["r0", "r0", "r1", "r1"]


def test_training_time_lets_short_groups_share_fewer_replicas():
    views = prompts(*[10] * 8, *[300] * 8)
    policy = HistoPipe(ranking_groups=2)

    def short(train_s: float) -> int:
        homes = policy.model_copy(update={"train_s": train_s}).homes(views, 1, replicas(8))
        return len(set(homes[:8]))

    assert short(1e6) <= short(0.0)


@pytest.mark.parametrize("step", [1, 2])
def test_the_core_binds_a_batch_by_its_step_and_starts_samples_nowhere_else(step):
    core = RolloutCore(Policies(ordering=HistoPipe(two_tier=False), chunking={"type": "fixed", "chunk_tokens": None}))
    for name in ("r0", "r1"):
        core.observe(join(name, 1000, max_running=64))
    groups = tuple(ev.GroupSpec(f"g{n}", 10, 2, 100, ((length,) * 2,)) for n, length in enumerate((90, 5, 80, 7)))
    core.observe(ev.SamplesSubmitted(now=0.0, batch_id="b", groups=groups, step=step))
    homes = {a.sample_id[:2]: a.replica_id for a in tick(core) if isinstance(a, StartChunk)}
    short, long = ("r0", "r1") if step % 2 else ("r1", "r0")
    assert homes == {"g0": long, "g1": short, "g2": long, "g3": short}


def test_groups_of_a_replica_that_left_are_bound_to_one_that_stays():
    core = RolloutCore(Policies(ordering="histo_pipe", chunking={"type": "fixed", "chunk_tokens": None}))
    for name in ("r0", "r1"):
        core.observe(join(name, 1000, max_running=64))
    submit(core, *(ev.GroupSpec(f"g{n}", 10, 2, 100, ((n + 1, n + 1),)) for n in range(4)))
    tick(core)
    core.observe(ev.ReplicaLeft(1.0, "r1", "gone"))
    again = [action for action in tick(core) if isinstance(action, StartChunk)]
    assert len(again) == 4 and {action.replica_id for action in again} == {"r0"}
