"""HistoPipe as an ordering: prompts of about one length share replicas, and long steps follow short ones (RhymeRL 6).

Prompts are ranked by the median length of their last epoch and cut into ranking groups. In odd steps the shortest group
gets the first replicas, in even steps the last ones. In the second tier long groups get more replicas, so that the
groups' times rise in a line (`tiers`). With `migrate` outliers leave their ranking group (`core.outliers`). Invariant:
equal batches and replicas give equal homes; each ranking group has a replica or more. Called by `UnassignedGroups`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from tailrace.policies.families.ordering import OneLane
from tailrace.policies.models.outlier_rule import OutlierRule
from tailrace.policies.models.tiers import plan_tiers
from tailrace.policies.protocol.views import GroupView, PromptView, ReplicaView, SampleView


class RankedPrompts(NamedTuple):
    """A ranking group. `places`: of its prompts in the batch. `limit_tokens`: longer answers are outliers; None: no
    history.
    """

    places: tuple[int, ...]
    replicas: tuple[str, ...]
    limit_tokens: float | None


class HistoPipe(OneLane, OutlierRule):
    """RhymeRL 6.2 to 6.4. Without history the batch is cut in the order given, as by `group_static`."""

    file_keys: ClassVar[tuple[str, ...]] = ("migrate",)
    type: Literal["histo_pipe"] = "histo_pipe"
    migrate: bool = Field(
        False, strict=True, description="outliers leave their ranking group: for a longer one, or for the next batch's"
    )
    ranking_groups: int = Field(8, ge=1, description="with two_tier (published: 8 and 16); else one per replica")
    alternate: bool = Field(
        True, strict=True, description="odd steps give the first replicas the shortest prompts, even the last"
    )
    two_tier: bool = Field(True, strict=True, description="more replicas to long ranking groups")
    train_s: float = Field(0.0, ge=0.0, description="seconds of training on a step: no group need be sooner through")

    def keys(self, sample: SampleView, group: GroupView) -> tuple[tuple, ...]:
        return ((),)

    def homes(self, prompts: Sequence[PromptView], step: int, replicas: Sequence[ReplicaView]) -> list[str]:
        """Returns the replica of each prompt's samples. `replicas`: all that are ready, in order of ids; one or
        more.
        """
        ranking = self.ranking(prompts, step, replicas)
        if not ranking:
            return [replicas[place * len(replicas) // len(prompts)].replica_id for place in range(len(prompts))]
        homes = [""] * len(prompts)
        for one in ranking:
            for turn, place in enumerate(one.places):  # so that each replica gets short and long ones of the group
                homes[place] = one.replicas[turn % len(one.replicas)]
        return homes

    def ranking(
        self, prompts: Sequence[PromptView], step: int, replicas: Sequence[ReplicaView]
    ) -> tuple[RankedPrompts, ...]:
        """Returns the ranking groups, shortest first; none without history."""
        if not any(map(last_epoch, prompts)):
            return ()
        count = len(replicas)
        groups = even_runs(ranked(prompts), min(self.ranking_groups if self.two_tier else count, count, len(prompts)))
        shares = [len(run) for run in even_runs(range(count), len(groups))]
        if self.two_tier:
            times = [partial(group_s, [prompts[place] for place in group], replicas) for group in groups]
            shares = plan_tiers(times, [len(group) for group in groups], count, self.train_s)
        order = [one.replica_id for one in (replicas if step % 2 or not self.alternate else replicas[::-1])]
        limits = self.limits([[prompts[place].past_lengths for place in group] for group in groups])
        return tuple(
            RankedPrompts(tuple(group), tuple(order[end - share : end]), limit)
            for group, share, end, limit in zip(groups, shares, accumulate(shares), limits, strict=True)
        )


def last_epoch(prompt: PromptView) -> tuple[int, ...]:
    """Returns the lengths of the newest earlier answers; empty without any."""
    return prompt.past_lengths[0] if prompt.past_lengths else ()


def ranked(prompts: Sequence[PromptView]) -> list[int]:
    """Returns the places of prompts by median length in the last epoch, shortest first; those without one at the
    middle.
    """
    medians = [float(np.median(past)) if (past := last_epoch(prompt)) else None for prompt in prompts]
    usual = float(np.median([median for median in medians if median is not None]))
    return sorted(range(len(prompts)), key=lambda place: (usual if medians[place] is None else medians[place], place))


def even_runs(items: Sequence, runs: int) -> list[Sequence]:
    """Cuts items in order into runs whose sizes differ by one at most."""
    return [items[len(items) * n // runs : len(items) * (n + 1) // runs] for n in range(runs)]


def group_s(prompts: Sequence[PromptView], replicas: Sequence[ReplicaView], count: int) -> float:
    """Returns the seconds of a ranking group on `count` replicas, tau(l, dp) of the paper, by lengths of its last
    epoch.

    The steps are those of the longest answer, or more if KV holds fewer samples. Each takes base + per chunk * chunks,
    by the mean of the measured steps; before the first measurement a step counts as one second.
    """
    known = [(prompt.prompt_tokens, tokens) for prompt in prompts for tokens in last_epoch(prompt)]
    if not known:
        return 0.0
    lines = [one.performance.line(one.max_running) for one in replicas if one.performance is not None]
    base_s = sum(base_s for base_s, _ in lines) / len(lines) if lines else 1.0
    chunk_s = sum(each_s for _, each_s in lines) / len(lines) if lines else 0.0
    capacity = max(1.0, sum(replica.kv_capacity_tokens for replica in replicas) / len(replicas))
    held = sum(tokens * (prompt + tokens) for prompt, tokens in known) / (capacity * count)
    steps = max(held, *(tokens for _, tokens in known))
    return base_s * steps + chunk_s * sum(t for _, t in known) / count
