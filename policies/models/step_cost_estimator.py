"""Seconds of an engine step by the tokens that it verifies, measured while the engine works.

Invariant: every figure comes from steps of this engine. Old ones fade, so the table follows the machine. It starts from
a rehearsal of a second (`Stepper`). Sizes without a measurement are on the line through the measured ones. Fed by
`Drafts`, read by the drafting policy as a `StepCost`.
"""

from bisect import bisect_left

import numpy as np

from tailrace.policies.protocol.step_cost import StepCost

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
"""Sizes. A step is filed under the smallest one that is not below its tokens."""

EVERY = 16
"""Records between two computations of the table: one costs as much as the drafts of several samples."""

FADE = 0.98
"""Weight of the observation 34 steps ago of the same size is one half: a few seconds of decoding."""


class StepCostEstimator:
    """Faded means of tokens and seconds per size."""

    def __init__(self):
        self._weight, self._tokens, self._seconds = np.zeros((3, len(TOKENS)))
        self._cost: StepCost | None = None
        self._records = 0

    def record(self, tokens: int, took_s: float) -> None:
        """Note a step that verified `tokens` tokens, bonus tokens included, and prefilled nothing."""
        size = min(bisect_left(TOKENS, tokens), len(TOKENS) - 1)
        for column, value in ((self._weight, 1.0), (self._tokens, tokens), (self._seconds, took_s)):
            column[size] = FADE * column[size] + value
        self._records += 1
        if self._records % EVERY == 0:
            self._cost = None

    def cost(self) -> StepCost | None:
        """Returns rising seconds over tokens, at most EVERY records old, or None before two sizes were measured."""
        if self._cost is None:
            seen = self._weight > 0
            if seen.sum() < 2:
                return None
            tokens, seconds = self._tokens[seen] / self._weight[seen], self._seconds[seen] / self._weight[seen]
            self._cost = StepCost(tuple(tokens.tolist()), tuple(rising(seconds, self._weight[seen]).tolist()))
        return self._cost


def rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest sequence that never falls (pool adjacent violators), f64[n]; weights f64[n] > 0."""
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, more, length = blocks.pop()
            last = blocks[-1]
            total = last[1] + more
            last[:] = [(last[0] * last[1] + mean * more) / total, total, last[2] + length]
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])
