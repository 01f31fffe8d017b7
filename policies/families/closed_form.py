"""Draft budgets that minimise the modelled time of the rest of the step (DAS 4.2, equations 3 to 7).

Invariant: budgets come from the N that minimises equation 5, found again at each step for the lengths that remain. A
member of the drafting family; called by the engine once per step.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.performance import FADE
from tailrace.policies.protocol.views import DraftView

ALPHAS = np.geomspace(0.1, 10.0, 17)
INNER = np.arange(1, 32)
"""Inner points of a grid with 32 steps: two such grids find N to a thousandth."""

GUESS_X, GUESS_TRIES = np.array([0.5, 1.0, 2.0]), np.full(3, 16.0)
GUESS_Y = 0.7 * (1 - np.exp(-GUESS_X))
"""Prior points of the curve before anything was verified: the first drafts are mostly right (alpha is 1), and 0.7 of an
answer can be drafted (k). Each of three points counts as 16 verifications.
"""


class PositionCounts(NamedTuple):
    """Verifications by draft length, faded: their number, and the draft tokens accepted in them."""

    tries: np.ndarray
    accepted: np.ndarray


class ClosedForm(BaseModel):
    """DAS 4.2: the budgets that minimise base cost x forward passes + token cost x drafts, solved for the passes too.

    With l tokens left to a sample and p drafts over all of them, k l (1 - exp(-alpha p / l)) are accepted (equation 3);
    N passes then take p = -(l / alpha) ln(1 - (1 - N / l) / k) where l > N, else none (equation 7). A sample gets
    p / N draft tokens a step. alpha and k are fitted to the accepted and drafted tokens of this replica.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["closed_form"] = "closed_form"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_classes: ClassVar[bool] = False
    by_worth: ClassVar[bool] = False
    max_draft_tokens: int = Field(16, ge=1, le=64, description="max draft tokens of a sample in a step")

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        """Returns the budgets. `memory`: PositionCounts."""
        count = len(view.proposed)
        if not count:
            return np.zeros(0, np.int32), memory
        memory = self._learn(view, memory)
        alpha, k = fit(memory)
        left = np.maximum(view.expected - view.generated, 1).astype(np.float64)
        base_s, drafting_s = view.cost.at([count, count * (1 + self.max_draft_tokens)])
        passes = best_passes(left, alpha, k, base_s, (drafting_s - base_s) / (count * self.max_draft_tokens))
        per_step = budgets(left, alpha, k, passes) / passes
        # A share of a token becomes a token in that share of the steps.
        turn = view.verifications
        wanted = np.floor(per_step * (turn + 1)) - np.floor(per_step * turn)
        return np.minimum(wanted, np.minimum(view.proposed, self.max_draft_tokens)).astype(np.int32), memory

    def _learn(self, view: DraftView, memory: PositionCounts | None) -> PositionCounts:
        size = self.max_draft_tokens + 1
        tries, accepted = memory or (np.zeros(size), np.zeros(size))
        drafted = np.where(view.verifications > 0, np.minimum(view.drafted_last, self.max_draft_tokens), 0)
        fade = FADE ** np.count_nonzero(drafted)
        hits = np.minimum(view.accepted_last, drafted)
        return PositionCounts(
            fade * tries + np.bincount(drafted, minlength=size),
            fade * accepted + np.bincount(drafted, weights=hits, minlength=size),
        )


def fit(evidence: PositionCounts) -> tuple[float, float]:
    """Returns alpha and k of equation 3, by least squares over a grid of alpha.

    A verification of d drafts, a of them accepted, makes 1 + a tokens: x = d / (1 + a) drafts and y = a / (1 + a)
    accepted per token of the answer, and equation 3 reads y = k (1 - exp(-alpha x)).
    """
    tries = evidence.tries[1:]
    mean = evidence.accepted[1:] / np.maximum(tries, 1e-9)
    x = np.concatenate((np.arange(1, len(tries) + 1) / (1 + mean), GUESS_X))
    y = np.concatenate((mean / (1 + mean), GUESS_Y))
    weights = np.concatenate((tries, GUESS_TRIES))
    shape = 1 - np.exp(-ALPHAS[:, None] * x)
    k = np.clip((shape * y) @ weights / (shape**2 @ weights), 0.05, 0.95)
    error = (k[:, None] * shape - y) ** 2 @ weights
    best = int(np.argmin(error))
    return float(ALPHAS[best]), float(k[best])


def best_passes(left: np.ndarray, alpha: float, k: float, base_s: float, token_s: float) -> float:
    """Returns N, the passes that minimise equation 5: where its derivative changes sign.

    J'(N) = base - token x (sum over l > N of l / (alpha (N - l (1 - k)))) grows with N, since terms shrink and drop
    out. N is searched between the bound that k sets and the longest l, on finer and finer grids.
    """
    low, high = float(left.max()) * (1 - k), float(left.max())
    for _ in range(2):
        step = (high - low) / (len(INNER) + 1)
        grid = low + step * INNER[:, None]  # above l (1 - k) of every sample, so that no term is divided by zero
        terms = np.where(left > grid, left / (alpha * (grid - left * (1 - k))), 0.0)
        first = int(np.count_nonzero(token_s * terms.sum(axis=1) > base_s))
        low, high = low + step * first, low + step * (first + 1)
    return high


def budgets(left: np.ndarray, alpha: float, k: float, passes: float) -> np.ndarray:
    """Returns the drafts with which each sample ends after this number of passes (equation 7)."""
    share = np.minimum(np.maximum(1 - passes / left, 0.0) / k, 1 - 1e-12)
    return -(left / alpha) * np.log1p(-share)
