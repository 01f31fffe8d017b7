"""Seconds of an engine step by its tokens and chunks, measured while the engine works.

Invariant: every figure comes from steps of this engine. Old ones fade, so the table follows the machine. It starts from
a rehearsal of a second (`Stepper`). Sizes without a measurement are interpolated. A chunk's own seconds are known if
steps of about as many tokens had different numbers of chunks; else only its tokens count. Owned by
`PerformanceEstimator`, and by a draft model for its own steps.
"""

from bisect import bisect_left

import numpy as np

from tailrace.policies.protocol.performance import FADE
from tailrace.policies.protocol.step_cost import StepCost

TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
"""Sizes, in tokens. A step is filed under the smallest one that is not below its tokens."""

EVERY = 16
"""Number of records between two computations of the table: one costs as much as the drafts of several samples."""

PAIRED = 20.0
"""Weight of the assumption that a chunk costs no seconds of its own, in steps that were compared."""


class StepCostEstimator:
    """Faded sums of tokens, chunks and seconds per size, of steps with few drafts and of those with many."""

    def __init__(self):
        # For each size: weight, tokens, chunks, seconds. Lists: on four numbers they are quicker than arrays.
        self._sums = [[[0.0] * 4 for _ in TOKENS] for _ in range(2)]
        self._learned: tuple[tuple[float, ...], tuple[float, ...], float] | None = None
        self._costs: dict[int, StepCost] = {}
        self._records = 0

    def record(self, tokens: int, took_s: float, chunks: int | None = None) -> None:
        """Records a step that verified `tokens` tokens, bonus tokens included, of `chunks` chunks (None: one of each),
        and prefilled nothing.
        """
        chunks = tokens if chunks is None else chunks
        size = min(bisect_left(TOKENS, tokens), len(TOKENS) - 1)
        cell = self._sums[tokens >= 2 * chunks][size]
        cell[:] = [FADE * old + new for old, new in zip(cell, (1.0, tokens, chunks, took_s), strict=True)]
        self._records += 1
        if self._records % EVERY == 0:
            self._learned = None

    def table(self) -> tuple[tuple[float, ...], tuple[float, ...], float] | None:
        """Returns tokens, rising seconds at them, and a chunk's own seconds, at most EVERY records old; or None before
        two sizes were measured."""
        if self._learned is None:
            weight, tokens, chunks, seconds = sums = np.moveaxis(np.array(self._sums), -1, 0)
            seen = weight.sum(axis=0) > 0
            if seen.sum() < 2:
                return None
            chunk_s = _chunk_s(*sums[:, :, seen])
            total = weight.sum(axis=0)[seen]
            means = (seconds - chunk_s * chunks).sum(axis=0)[seen] / total
            means = np.maximum(rising(means, total), 1e-9)
            self._learned = tuple((tokens.sum(axis=0)[seen] / total).tolist()), tuple(means.tolist()), chunk_s
            self._costs.clear()
        return self._learned

    def cost(self, chunks: int = 0) -> StepCost | None:
        """Returns the cost of a step of `chunks` chunks by its tokens, or None before two sizes were measured."""
        if (table := self.table()) is None:
            return None
        if (cost := self._costs.get(chunks)) is None:
            tokens, seconds, chunk_s = table
            own_s = chunk_s * chunks
            cost = self._costs[chunks] = StepCost(tokens, tuple(took_s + own_s for took_s in seconds))
        return cost


def _chunk_s(weight: np.ndarray, tokens: np.ndarray, chunks: np.ndarray, seconds: np.ndarray) -> float:
    """Returns the seconds of one more chunk at equal tokens, from sizes that were measured with few and with many
    drafts.

    Arrays f64[2, sizes]. Weighted by the smaller weight of a pair, against PAIRED observations of no difference.
    """
    both = (weight > 0).all(axis=0)
    if not both.any():
        return 0.0
    few, many = (np.stack((chunks, seconds)) / np.maximum(weight, 1e-12))[:, :, both].swapaxes(0, 1)
    more, longer_s, pairs = few[0] - many[0], few[1] - many[1], weight[:, both].min(axis=0)
    scale = float((pairs * more**2).sum())
    if scale <= 0.0:
        return 0.0
    found_s, trusted = float((pairs * more * longer_s).sum()) / scale, float(pairs.sum())
    bound_s = float((few[1] / few[0]).min())  # a chunk's tokens are not free
    return min(max(0.0, found_s * trusted / (trusted + PAIRED)), bound_s / 2)


def rising(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Returns the nearest sequence that never falls (pool adjacent violators), f64[n]; weights f64[n] > 0."""
    blocks: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            mean, more, length = blocks.pop()
            last = blocks[-1]
            total = last[1] + more
            last[:] = [(last[0] * last[1] + mean * more) / total, total, last[2] + length]
    return np.concatenate([np.full(length, mean) for mean, _, length in blocks])
