"""HistoPipe: which worker gets which prompts of a step, so that long prompts follow short ones (RhymeRL 6).

Invariants: each prompt is assigned once; each worker belongs to one ranking group, and has work if there are as many
prompts as workers. Without history prompts are divided in the order given, and nothing moves. Pure: ranks come from
earlier epochs, ties go by prompt id. `assign` is called when a step is planned, `migration` when its answers end.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from tailrace.policies.families.histo_pipe import even_runs
from tailrace.policies.models.outlier_rule import OutlierRule
from tailrace.policies.models.tiers import plan_tiers


class Prompt(NamedTuple):
    """`past`: lengths in tokens of its answers in earlier epochs, newest first."""

    prompt_id: str
    past: tuple[tuple[int, ...], ...] = ()


class RankingGroup(NamedTuple):
    """Prompts of about one length. `shares[j]`: ids of the prompts of `workers[j]`. `outlier_tokens`: length past which
    an answer may move, None if nothing is known of lengths.
    """

    workers: tuple[int, ...]
    shares: tuple[tuple[str, ...], ...]
    outlier_tokens: float | None


GroupTime = Callable[[Sequence[Prompt], int], float]
"""Expected seconds of a ranking group on so many workers: tau(l, dp), which the paper looks up in a profile."""


class HistoPipeline(OutlierRule):
    """Policy of RhymeRL 6.2 to 6.4. `alternate` and `two_tier` are its two tiers, each selectable alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["histo_pipe"] = "histo_pipe"
    alternate: bool = Field(True, description="odd steps give the first workers the shortest prompts, even the longest")
    two_tier: bool = Field(True, description="more workers to long ranking groups")
    ranking_groups: int = Field(8, ge=1, description="with two_tier (published: 8 and 16); else one per worker")

    def assign(
        self, prompts: Sequence[Prompt], workers: int, step: int, time_s: GroupTime, train_s: float
    ) -> tuple[RankingGroup, ...]:
        """Returns the ranking groups, shortest first, on workers 0 to workers - 1. The second tier uses `time_s`, and
        `train_s`, the seconds of the last training.
        """
        if not any(prompt.past for prompt in prompts):
            return in_order(prompts, workers)
        ranked = rank(prompts)
        groups = even_runs(ranked, min(self.ranking_groups if self.two_tier else workers, workers, len(ranked)))
        counts = [len(run) for run in even_runs(range(workers), len(groups))]
        if self.two_tier:
            counts = plan_tiers([partial(time_s, group) for group in groups], list(map(len, groups)), workers, train_s)
        order = range(workers) if step % 2 or not self.alternate else range(workers - 1, -1, -1)
        limits = self.limits([[prompt.past for prompt in group] for group in groups])
        return tuple(
            _seated(group, tuple(order[end - count : end]), limit)
            for group, count, end, limit in zip(groups, counts, accumulate(counts), limits, strict=True)
        )


def rank(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns prompts by median length in the last epoch, shortest first. Prompts without history are placed at the
    median of the others.
    """
    medians = {prompt.prompt_id: float(np.median(prompt.past[0])) for prompt in prompts if prompt.past}
    usual = float(np.median(list(medians.values())))
    return sorted(prompts, key=lambda prompt: (medians.get(prompt.prompt_id, usual), prompt.prompt_id))


def in_order(prompts: Sequence[Prompt], workers: int) -> tuple[RankingGroup, ...]:
    """Returns one ranking group: whole prompts in the order given, in equal runs, as verl does. Nothing moves."""
    shares = tuple(tuple(prompt.prompt_id for prompt in run) for run in even_runs(prompts, workers))
    return (RankingGroup(tuple(range(workers)), shares, None),)


def _seated(group: Sequence[Prompt], workers: tuple[int, ...], limit: float | None) -> RankingGroup:
    """Returns a ranking group whose prompts are dealt one by one, so that each worker gets short and long ones."""
    shares = tuple(tuple(prompt.prompt_id for prompt in group[j :: len(workers)]) for j in range(len(workers)))
    return RankingGroup(workers, shares, limit)
