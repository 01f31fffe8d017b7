"""Times that no schedule can beat, whatever it knows: they stand beside every makespan.

Each is a relaxation, so it holds for every policy that runs on `cluster`: an engine step of a batch takes
base_s + token_s * (1 + drafts, summed) + context_s * (context, summed), makes 1 + p + ... + p^w tokens of a sample with
w drafts on average, and its batch fits max_running and the KV capacity. Where tokens are drawn rather than expected,
so are the times they bound. Drafting is free here; a group's prompt is computed at least once, by a replica that does
nothing else meanwhile. Called with every simulation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.simulator.acceptance import Chances
from app.simulator.types import Cluster, Group, StepModel

BASE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of a step's base time, how much is shared out by head rather than by context; each share gives a bound."""

POINTS = 33
"""Context lengths at which a sample's cost is worked out. More make the bounds tighter by less than 0.1 %."""


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples as arrays: tokens of the prompt and of the answer, and by drafts what a step makes: [samples, w]."""

    prompt_tokens: np.ndarray
    tokens: np.ndarray
    made: np.ndarray

    def least_costs(self, step: StepModel, head: float, room: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of a token where each answer has so many tokens, those numbers, and the most that a step makes.

        Of the base, `head` counts for each sample of a step, and `room` for each token of answer that it has. A step
        reads the context it starts with, so the token at x may cost what it would `stride` tokens earlier.
        """
        stride = np.minimum(self.made[:, -1], self.tokens)
        at = np.linspace(np.zeros(len(stride)), self.tokens - stride, POINTS)
        context_s = step.context_s * self.prompt_tokens + (step.context_s + step.base_s * room) * at
        drafts = range(self.made.shape[1])
        costs = [(step.base_s * head + step.token_s * (1 + w) + context_s) / self.made[:, w] for w in drafts]
        return np.minimum.reduce(costs), at, stride

    def least_s(self, step: StepModel, head: float, room: float) -> np.ndarray:
        """Of each sample, the integral over its answer. Of straight lines the cheapest is concave, so that straight
        pieces between points stay below it."""
        cost, at, stride = self.least_costs(step, head, room)
        return np.trapezoid(cost, at, axis=0) + stride * cost[0]

    def least_kv(self, step: StepModel) -> np.ndarray:
        """Of each sample, token-seconds of its answer's KV. Both factors rise, so that left ends stay below."""
        cost, at, _ = self.least_costs(step, 1.0, 0.0)
        return (cost[:-1] * at[:-1] * np.diff(at, axis=0)).sum(axis=0)


def bounds(
    groups: Sequence[Group], cluster: Cluster, acceptance: Chances | None = None, most_drafts: int = 0
) -> dict[str, float]:
    """Lower bounds in seconds of the time from submission of `groups` to the end of their last sample.

    work_s: all replica time there is must hold the least replica time that every token takes. A step's base time is
    at least the sum, over its batch, of base_s * (share / max_running + (1 - share) * answer so far / KV capacity),
    since neither quotient sums to more than 1; so a sample's token costs at least that and its own terms, over the
    tokens of its step.
    longest_s: a sample's steps come one after another, and each takes at least its own terms and the whole base.
    memory_s: the KV capacity of all replicas, over time, must hold each answer's KV for as long as its steps take at
    least. (Never above work_s, as no answer is larger than the capacity. A prompt's KV may be shared and is left out.)
    best_s: the greatest of them. All are 0 without groups; drafts without an acceptance are never right.
    """
    if not groups:
        return {"work_s": 0.0, "longest_s": 0.0, "memory_s": 0.0, "best_s": 0.0}
    model, replicas = cluster.replica, cluster.replicas
    step, capacity = model.step, model.kv_capacity_tokens
    samples = _samples(groups, acceptance, most_drafts)
    tokens_s = max(
        samples.least_s(step, share / model.max_running, (1 - share) / capacity).sum() for share in BASE_SHARES
    )
    prompts_s = sum(group.prompt_tokens for group in groups) / model.prefill_tokens_s
    alone_s = samples.least_s(step, 1.0, 0.0) + samples.prompt_tokens / model.prefill_tokens_s
    found = {
        "work_s": float(tokens_s + prompts_s) / replicas,
        "longest_s": float(alone_s.max()),
        "memory_s": float(samples.least_kv(step).sum()) / (capacity * replicas),
    }
    return {**found, "best_s": max(found.values())}


def _samples(groups: Sequence[Group], acceptance: Chances | None, most_drafts: int) -> Samples:
    """With all mates' tokens and all history known, since more evidence is never worse."""
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
