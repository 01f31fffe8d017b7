"""Times that no schedule can beat, with any knowledge, and the time that is reachable without any. Every makespan is
reported with them.

Each bound is a relaxation, so it holds for every policy that runs on `cluster`: an engine step takes StepModel.seconds
of its tokens (1 + drafts, summed) and contexts, makes 1 + p + ... + p^w tokens on average of a sample with w drafts,
and its batch fits max_running and the KV capacity. If tokens are drawn rather than expected, so are the times they
bound. Drafting is free here; a group's prompt is computed at least once, by a replica that does nothing else meanwhile.
Called with every simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.lab.simulator.acceptance import Chances
from tailrace.lab.simulator.types import Cluster, ReplicaModel, StepModel, WorkloadGroup

HEAD_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a step's own time that are divided by head rather than by room; each gives a bound."""

POINTS = 33
"""Number of context lengths at which a sample's cost is worked out. More make the bounds tighter by less than 0.1 %."""


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples as arrays: tokens of the prompt and of the answer, and by drafts the tokens of a step: [samples,
    w].
    """

    prompt_tokens: np.ndarray
    tokens: np.ndarray
    made: np.ndarray

    def least_costs(
        self, step: StepModel, own_s: Sequence[float], room_s: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns seconds of a token when each answer has this many tokens, those numbers, and the max tokens of a
        step.

        To a step with w drafts a sample adds own_s[w], the time to read its context, and room_s for each token that its
        answer has. A step reads the context it starts with: the token at x may cost what it would `stride` earlier.
        """
        stride = np.minimum(self.made[:, -1], self.tokens)
        at = np.linspace(np.zeros(len(stride)), self.tokens - stride, POINTS)
        context_s = step.context_s * self.prompt_tokens + (step.context_s + room_s) * at
        costs = [(own_s[w] + context_s) / self.made[:, w] for w in range(self.made.shape[1])]
        return np.minimum.reduce(costs), at, stride

    def least_s(self, step: StepModel, own_s: Sequence[float], room_s: float = 0.0) -> np.ndarray:
        """Returns for each sample the integral over its answer. The cheapest of straight lines is concave, so that
        straight pieces between points stay below it.
        """
        cost, at, stride = self.least_costs(step, own_s, room_s)
        return np.trapezoid(cost, at, axis=0) + stride * cost[0]

    def least_kv(self, step: StepModel, own_s: Sequence[float]) -> np.ndarray:
        """Returns for each sample the token-seconds of its answer's KV: the same pieces times the tokens there,
        integrated.
        """
        cost, at, _ = self.least_costs(step, own_s, 0.0)
        (a, b), (c, d) = (at[:-1], at[1:]), (cost[:-1], cost[1:])
        return ((b - a) * (2 * a * c + a * d + b * c + 2 * b * d)).sum(axis=0) / 6


def bounds(
    groups: Sequence[WorkloadGroup], cluster: Cluster, acceptance: Chances | None = None, most_drafts: int = 0
) -> dict[str, float]:
    """Returns lower bounds in seconds of the time from submission of `groups` to the end of their last sample.

    work_s: the time of all replicas together must hold the min replica time of every token (see `_work_s`).
    longest_s: a sample's steps come one after another, and none is shorter than if it ran alone.
    memory_s: the KV capacity of all replicas, over time, must hold each answer's KV for the min time of its steps.
    (Never above work_s, as no answer is larger than the capacity. A prompt's KV may be shared: left out.)
    best_s: the max of them. All are 0 without groups; drafts without an acceptance are never right.
    """
    if not groups:
        return {"work_s": 0.0, "longest_s": 0.0, "memory_s": 0.0, "best_s": 0.0}
    model, replicas = cluster.replica, cluster.replicas
    samples = _samples(groups, acceptance, most_drafts)
    alone = [model.step.seconds(1 + w, 0) for w in range(samples.made.shape[1])]
    prompts_s = sum(group.prompt_tokens for group in groups) / model.prefill_tokens_s
    one_by_one_s = samples.least_s(model.step, alone) + samples.prompt_tokens / model.prefill_tokens_s
    found = {
        "work_s": (_work_s(samples, model) + prompts_s) / replicas,
        "longest_s": float(one_by_one_s.max()),
        "memory_s": float(samples.least_kv(model.step, alone).sum()) / (model.kv_capacity_tokens * replicas),
    }
    return {**found, "best_s": max(found.values())}


def reachable_s(found: Mapping[str, float]) -> float | None:
    """Returns work_s + longest_s of what `bounds` returns, or of sums of it over steps; None if one of them is missing.

    It is not a bound. A schedule that cannot know who is long keeps replicas equally full, so every replica's steps run
    until the longest sample ends: the replica time of all tokens, plus the steps' own time for that sample. A schedule
    that knows lengths puts long samples together and can beat it.
    """
    parts = found.get("work_s"), found.get("longest_s")
    return None if None in parts else sum(parts)


def alone_s(
    group: WorkloadGroup, index: int, model: ReplicaModel, acceptance: Chances | None = None, most_drafts: int = 0
) -> float:
    """Returns the seconds of one sample's steps one after another with the best drafts: its part of longest_s, without
    its prompt.
    """
    samples = _samples([group], acceptance, most_drafts)
    alone = [model.step.seconds(1 + w, 0) for w in range(samples.made.shape[1])]
    return float(samples.least_s(model.step, alone)[index])


def _work_s(samples: Samples, model: ReplicaModel) -> float:
    """Returns the min replica time of all answers: a token costs its sample's part of a step over the step's tokens, or
    more.

    A step's own time (base, and experts read) is divided in two ways, or by a mean of both, and each gives a bound. By
    head: of n <= N = max_running samples each bears (base + E(N)) / N, as E, the experts' seconds by tokens, is concave
    and 0 at 0. By room: answers of x tokens bear (base + E(K / X)) * x / K, K the KV capacity and X the longest answer;
    these x sum to at most K, and n >= sum / X, so that E(n) >= E(sum / X) >= E(K / X) * sum / K.
    """
    step, most, capacity = model.step, model.max_running, model.kv_capacity_tokens
    fewest = max(1.0, capacity / float(samples.tokens.max()))
    head_s = (step.seconds(most, 0) - step.token_s * most) / most
    room_s = (step.seconds(fewest, 0) - step.token_s * fewest) / capacity
    computed_s = step.token_s * (1 + np.arange(samples.made.shape[1]))
    return max(
        float(samples.least_s(step, computed_s + share * head_s, (1 - share) * room_s).sum()) for share in HEAD_SHARES
    )


def _samples(groups: Sequence[WorkloadGroup], acceptance: Chances | None, most_drafts: int) -> Samples:
    """Returns the samples with all mates' tokens and all history known, since more evidence is never worse."""
    rows = [(group, index) for group in groups for index in range(len(group.lengths))]
    made = np.ones((len(rows), 1))
    if acceptance is not None and most_drafts:
        chances = [
            acceptance.chance(group, index, group.lengths[index], len(group.lengths) - 1, len(group.past_lengths))
            for group, index in rows
        ]
        made = np.cumsum(np.array(chances)[:, None] ** np.arange(most_drafts + 1), axis=1)
    prompts = np.array([group.prompt_tokens for group, _ in rows], float)
    return Samples(prompts, np.array([group.lengths[index] for group, index in rows], float), made)
