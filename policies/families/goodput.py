"""Draft budgets by the tokens that a second of an engine step is expected to bring. The default.

Invariant: by its own model no choice of budgets is better, including that of no drafts. The model is the measured cost
of steps and the chances that come with proposals, corrected by how often such chances came true on this replica. A
member of the drafting family; called by the engine once per step.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.performance import FADE, PRIOR_TOKENS, count_tested
from tailrace.policies.protocol.views import DraftView

BINS = 10
"""Bins of chances from 0 to 1: a claimed 0.9 that comes true at 0.6 says nothing about a claimed 0.3."""


class Track(NamedTuple):
    """Record of the draft tokens tested so far, faded per step: per bin, the sum of their claimed chances and the
    number of right ones. A bin's claim is worth PRIOR_TOKENS tokens at first.
    """

    claimed: np.ndarray  # float64[BINS]
    right: np.ndarray  # float64[BINS]
    last: np.ndarray  # float32[slots, max_draft_tokens]: chances claimed in each slot's last proposal

    def factors(self) -> np.ndarray:
        """Returns the correction factor of a claimed chance, by bin."""
        trusted = PRIOR_TOKENS * (np.arange(BINS) + 0.5) / BINS
        return (self.right + trusted) / (self.claimed + trusted)


class Goodput(BaseModel):
    """Max expected tokens per second of step time, by measured step costs; late in a step, of the longest samples.

    Draft token j of sample i is kept with the product of the chances of tokens 1 to j. Taking tokens in falling order
    of that product, the expected tokens of the step over its time, (n + sum of products) / t(n + taken), is best at
    one of the prefixes: products fall along a sample, so each prefix is a choice of budgets, and the best one of its
    size. Budget 0 is among them and wins unless another gains `margin`. When few samples run, no sample waits for their
    places and the longest decides when the step ends: each one's tokens then count by its share of the longest
    expected remainder, to the power of `tail_weight`; a sample that has outlived its expectation counts in full.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["goodput"] = "goodput"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_classes: ClassVar[bool] = False
    by_worth: ClassVar[bool] = True
    max_draft_tokens: int = Field(16, ge=1, le=64, description="max draft tokens of a sample in a step")
    margin: float = Field(0.01, ge=0.0, le=1.0, description="min predicted gain over no drafts")
    tail_weight: float = Field(1.0, ge=0.0, le=8.0, description="how much the longest sample counts late; 0: no more")
    tail_running: int = Field(4, ge=0, le=4096, description="late means at most this many running samples here")

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        """Returns the budgets. `memory`: Track."""
        count = len(view.proposed)
        if not count:
            return np.zeros(0, np.int32), memory
        window = min(self.max_draft_tokens, view.right.shape[1])
        claimed = np.where(np.arange(window) < view.proposed[:, None], view.right[:, :window], 0.0)
        memory = self._learn(view, claimed, memory)
        chances = np.minimum(claimed * memory.factors()[_bins(claimed)], 1.0)
        weights = self._weights(view)
        # Token by token, not sample by sample, so that of equals the earlier ones of a sample come first.
        gains = (np.cumprod(chances, axis=1) * weights[:, None]).T.ravel()
        order = np.flatnonzero(gains)
        order = order[np.argsort(-gains[order], kind="stable")]
        tokens = weights.sum() + np.concatenate(([0.0], np.cumsum(gains[order])))
        rates = tokens / view.cost.at(count + np.arange(len(tokens)))
        best = int(np.argmax(rates))
        if rates[best] < rates[0] * (1.0 + self.margin):
            best = 0
        return np.bincount(order[:best] % count, minlength=count).astype(np.int32), memory

    def _weights(self, view: DraftView) -> np.ndarray:
        count = len(view.proposed)
        if count > self.tail_running:
            return np.ones(count)
        left = (view.expected - view.generated).astype(np.float64)
        outlived = left <= 1  # it is not about to end: its end is unknown
        left[outlived] = max(1.0, left.max())
        return (left / left.max()) ** self.tail_weight

    def _learn(self, view: DraftView, claimed: np.ndarray, memory: Track | None) -> Track:
        """Adds the last drafts to the record: the right tokens of a draft and the first wrong one were tested, later
        ones not.
        """
        track = memory or Track(np.zeros(BINS), np.zeros(BINS), np.zeros((0, self.max_draft_tokens), np.float32))
        last = np.zeros((max(len(track.last), int(view.slot.max()) + 1), self.max_draft_tokens), np.float32)
        last[: len(track.last)] = track.last
        drafted = np.where(view.verifications > 0, np.minimum(view.drafted_last, self.max_draft_tokens), 0)
        accepted = np.minimum(view.accepted_last, drafted)
        chances, place = last[view.slot], np.arange(self.max_draft_tokens)
        tested = (place < count_tested(accepted, drafted)[:, None]) & (chances > 0)  # 0: drafted before this memory
        bins = _bins(chances).ravel()
        claimed_now = np.bincount(bins, (chances * tested).ravel(), BINS)
        right_now = np.bincount(bins, (tested & (place < accepted[:, None])).ravel(), BINS)
        last[view.slot] = 0.0
        last[view.slot, : claimed.shape[1]] = claimed
        return Track(FADE * track.claimed + claimed_now, FADE * track.right + right_now, last)


def _bins(chances: np.ndarray) -> np.ndarray:
    return np.minimum((chances * BINS).astype(np.intp), BINS - 1)
