"""Lower bounds hold for the best of all schedules, found by trying every one of tiny instances, and are not idle."""

from functools import cache
from itertools import chain, combinations, product
from random import Random

import pytest

from tailrace.lab.simulator.acceptance import expected_tokens
from tailrace.lab.simulator.bounds import bounds
from tailrace.lab.simulator.types import Cluster, ReplicaModel, StepModel, WorkloadGroup

DENSE = StepModel(1.0, 0.2, 0.05)
EXPERTS = StepModel(0.3, 0.1, 0.05, experts_s=2.0, expert_share=0.4)
WIDE = StepModel(0.1, 0.5, 0.2)


class Fixed:
    def __init__(self, chance):
        self.p = chance

    def chance(self, group, index, generated, mates, epochs):
        return self.p


def cluster(step=DENSE, replicas=1, capacity=100, running=8, prefill=10.0) -> Cluster:
    return Cluster(ReplicaModel(step, capacity, running, prefill, 0.0, 0.0), replicas)


def best_makespan(groups, where: Cluster, chance: float, most: int) -> float:
    """The least time over every order of every batch with every draft length, on replicas that step when they like.

    A group's prompt is computed in the step that first takes one of its samples; from its end on it is free for all.
    """
    model = where.replica
    samples = [(n, group.prompt_tokens, tokens) for n, group in enumerate(groups) for tokens in group.lengths]
    gains = [expected_tokens(chance, drafts) for drafts in range(most + 1)]

    def batches(made, busy, ready):
        """(seconds, gain by sample, prompts computed) of every step that a free replica could take."""
        free = [n for n in range(len(samples)) if n not in busy and made[n] < samples[n][2] - 1e-9]
        for chosen in chain.from_iterable(
            combinations(free, k) for k in range(1, min(len(free), model.max_running) + 1)
        ):
            context = sum(samples[n][1] + made[n] for n in chosen)
            if context > model.kv_capacity_tokens + 1e-9:
                continue
            prompts = {samples[n][0]: samples[n][1] for n in chosen if samples[n][0] not in ready}
            for drafts in product(range(most + 1), repeat=len(chosen)):
                seconds = model.step.seconds(sum(drafts) + len(chosen), context)
                seconds += sum(prompts.values()) / model.prefill_tokens_s
                yield seconds, tuple((n, gains[w]) for n, w in zip(chosen, drafts, strict=True)), frozenset(prompts)

    @cache
    def rest(made, ready, going, idle) -> float:
        """`going`: (seconds left, gains, prompts) of steps under way; `idle`: replicas that wait for one of them."""
        if all(m >= tokens - 1e-9 for m, (_, _, tokens) in zip(made, samples, strict=True)):
            return 0.0
        least = float("inf")
        if len(going) + idle < where.replicas:
            busy = {n for _, gain, _ in going for n, _ in gain}
            for step in batches(made, busy, ready):
                least = min(
                    least, rest(made, ready, tuple(sorted((*going, (round(step[0], 9), *step[1:])), key=str)), idle)
                )
            return min(least, rest(made, ready, going, idle + 1)) if going else least
        past = min(seconds for seconds, _, _ in going)
        now, later = list(made), []
        for seconds, gain, prompts in going:
            if seconds - past < 1e-9:
                ready |= prompts
                for n, tokens in gain:
                    now[n] = round(min(now[n] + tokens, samples[n][2]), 9)
            else:
                later.append((round(seconds - past, 9), gain, prompts))
        return past + rest(tuple(now), ready, tuple(later), 0)

    return rest((0.0,) * len(samples), frozenset(), (), 0)


def instance(seed: int):
    rng = Random(seed)
    replicas, most = rng.choice([(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)])
    count = 2 if replicas == 2 or most == 2 else 3
    lengths = [rng.randint(1, 4 if replicas == 1 and most < 2 else 3) for _ in range(count)]
    cut = rng.randint(1, count)
    groups = [
        WorkloadGroup(f"g{n}", rng.randint(0, 3), tuple(part))
        for n, part in enumerate((lengths[:cut], lengths[cut:]))
        if part
    ]
    largest = max(group.prompt_tokens for group in groups) + max(lengths)
    where = cluster(
        rng.choice([DENSE, EXPERTS, WIDE]),
        replicas,
        rng.randint(largest, 2 * largest),
        rng.randint(1, 3),
        rng.choice([2.0, 50.0]),
    )
    return groups, where, rng.choice([0.0, 0.5, 1.0]) if most else 0.0, most


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_of_a_tiny_instance_beats_them(seed):
    groups, where, chance, most = instance(seed)
    found = bounds(groups, where, Fixed(chance), most)
    least = best_makespan(groups, where, chance, most)
    for name, seconds in found.items():
        assert 0 <= seconds <= least + 1e-6, (name, seconds, least)
    assert found["best_s"] == max(found.values()) and found["memory_s"] <= found["work_s"] + 1e-9


def test_a_sample_alone_takes_its_bound():
    """500 tokens after a prompt of 40: a step a token, each reading what is there."""
    steps = sum(DENSE.seconds(1, 40 + n) for n in range(500))
    found = bounds([WorkloadGroup("g", 40, (500,))], cluster(capacity=1000))
    assert found["longest_s"] == pytest.approx(4 + steps, rel=2e-3)
    assert found["best_s"] == found["longest_s"]


@pytest.mark.parametrize("step", [DENSE, EXPERTS])
def test_a_full_batch_takes_its_work_bound(step):
    """Eight equal samples on a replica that runs eight: the batch in lockstep is the best there is."""
    steps = sum(step.seconds(8, 8 * (40 + n)) for n in range(500))
    found = bounds([WorkloadGroup("g", 40, (500,) * 8)], cluster(step, capacity=10**6))
    assert found["work_s"] == pytest.approx(4 + steps, rel=2e-3)


def test_memory_bounds_the_batch():
    """Room for four of a hundred samples: with a base that is all, the work bound comes near what it takes."""
    step = StepModel(1.0, 1e-9, 1e-9)
    found = bounds([WorkloadGroup("g", 1, (1000,) * 100)], cluster(step, capacity=4000, running=100, prefill=1e9))
    assert found["work_s"] == pytest.approx(found["memory_s"], rel=0.01)
    assert found["work_s"] == pytest.approx(1000 * 100 / 8, rel=0.01)  # a sample holds half of its length on average


def test_few_long_samples_read_few_experts():
    """Room for one at a time: they run one after another, and a step reads one token's experts."""
    step = StepModel(1e-3, 1e-3, 1e-6, experts_s=2.0, expert_share=0.4)
    steps = 5 * sum(step.seconds(1, 1 + n) for n in range(400))
    found = bounds([WorkloadGroup("g", 1, (400,) * 5)], cluster(step, capacity=401, prefill=1e9))
    assert steps / 3 < found["work_s"] < steps


def test_drafts_that_are_right_help_and_wrong_ones_do_not():
    groups = [WorkloadGroup("g", 10, (200, 90), ((150, 80),))]
    none, wrong, right = (bounds(groups, cluster(capacity=1000), Fixed(p), 8)["best_s"] for p in (0.0, 1e-9, 0.9))
    assert none == pytest.approx(wrong) and right < none / 2
    assert bounds(groups, cluster(capacity=1000), None, 8)["best_s"] == none


def test_twice_the_replicas_halve_the_work_and_nothing_else():
    groups = [WorkloadGroup("g", 10, (200,) * 16)]
    one, two = (bounds(groups, cluster(capacity=1000, replicas=n)) for n in (1, 2))
    assert two["work_s"] == pytest.approx(one["work_s"] / 2) and two["longest_s"] == one["longest_s"]


def test_nothing_to_do_takes_no_time():
    assert set(bounds([], cluster()).values()) == {0.0}
