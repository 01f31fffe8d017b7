"""Outliers of a ranking group: answers longer than its history lets expect, and where they continue (RhymeRL 6.3).

Invariant: nothing moves without history. Pure; called by `HistoPipe` of the orderings, for `policies.core.outliers`,
and by `lab.research.histopipe`.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

Epochs = Sequence[Sequence[int]]
"""Lengths in tokens of a prompt's earlier answers, by epoch, newest first."""


class OutlierRule(BaseModel):
    """The knobs of migration, with the published values."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    last_share: float = Field(0.1, ge=0.0, le=1.0, description="alpha: last share of a ranking group that may move")
    least_growth: float = Field(1.1, ge=1.0, description="least beta: growth past which an answer is an outlier")
    short_share: float = Field(
        0.5, ge=0.0, le=1.0, description="share of ranking groups whose outliers stay in their step (not published)"
    )

    def limits(self, ranks: Sequence[Sequence[Epochs]]) -> list[float | None]:
        """Returns the tokens past which an answer is an outlier, by ranking group: beta times the longest history of
        its prompts; None for a group without history. `ranks`: the histories of each group's prompts.

        A prompt's history is the median of its last epoch, as for ranks (6.2). By the longest answer instead, 0.2 % of
        samples would move and not the published 1.5 to 4.6 %.
        """
        growth = beta([past for rank in ranks for past in rank], self.least_growth)
        longest = [
            max((float(np.median(past[0])) for past in rank if past and past[0]), default=None) for rank in ranks
        ]
        return [None if tokens is None else growth * tokens for tokens in longest]

    def migration(self, rank: int, ranks: int, unfinished: int, samples: int) -> Literal["stay", "within", "next"]:
        """Returns where an outlier continues when `unfinished` of its ranking group's samples are left.

        Those of short groups move to a longer group of the step; those of long ones to the next step, since nobody
        else of this one is at work so late.
        """
        if unfinished > self.last_share * samples:
            return "stay"
        return "within" if rank < self.short_share * ranks else "next"


def beta(pasts: Sequence[Epochs], least: float) -> float:
    """Returns the 75th percentile over prompts of how mean lengths grew from the epoch before the last, at least
    `least`.
    """
    growths = [np.mean(past[0]) / np.mean(past[1]) for past in pasts if len(past) > 1 and past[0] and any(past[1])]
    return max(least, float(np.percentile(growths, 75))) if growths else least
