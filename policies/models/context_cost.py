"""Seconds that a token of context adds to an engine's step, measured while the engine works.

Steps of about as many tokens are compared with each other: those with more context read more KV. Invariant: old steps
fade, and steps whose contexts hardly differ tell nothing. Owned by `PerformanceEstimator`.
"""

from bisect import bisect_left

import numpy as np

from tailrace.policies.models.step_cost_estimator import TOKENS
from tailrace.policies.protocol.performance import FADE

LEAST_SPREAD = 0.1
"""Relative spread of contexts at which half of a slope is believed: with less, the noise of steps would decide."""


class ContextCost:
    """Faded sums over steps, by their number of tokens. A step's excess is its context beyond that of as many mean
    chunks, so that a chunk's own seconds do not count as those of its context.
    """

    def __init__(self):
        # For each size: weight; excess, seconds; their products; usual. Lists: quicker than arrays on so few numbers.
        self._sums = [[0.0] * 6 for _ in TOKENS]
        self._chunks = self._context = 0.0

    def record(self, tokens: int, chunks: int, context_tokens: int, took_s: float) -> None:
        """Records a step that verified `tokens` tokens for `chunks` chunks with this context in all."""
        self._chunks, self._context = FADE * self._chunks + chunks, FADE * self._context + context_tokens
        usual = self.of_chunk() * chunks
        excess = context_tokens - usual
        cell = self._sums[min(bisect_left(TOKENS, tokens), len(TOKENS) - 1)]
        new = 1.0, excess, took_s, excess**2, excess * took_s, usual**2
        cell[:] = [FADE * old + one for old, one in zip(cell, new, strict=True)]

    def token_s(self) -> float:
        """Returns the seconds of a token of context; 0 if nothing was measured."""
        sums = np.array(self._sums)
        weight, excess, seconds, squares, products, usual = sums[sums[:, 0] > 0].T
        apart = float((squares - excess**2 / weight).sum()) + LEAST_SPREAD**2 * float(usual.sum())
        together = float((products - excess * seconds / weight).sum())
        return max(0.0, together / apart) if apart else 0.0

    def of_chunk(self) -> float:
        """Returns the mean context of a chunk, in tokens."""
        return self._context / self._chunks if self._chunks else 0.0
