"""Known lengths of a batch as a whole: its spread, and the three length classes of DAS.

A value, computed from all past and finished lengths together. `LengthTracker` renews it as the evidence doubles.
Lengths enter as logarithms, because they are skewed: otherwise one runaway answer would decide every mean.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

PASS_SHARE = 0.4
"""Target forward passes of the longest answer, per token of it. Suffix drafts from group and history reach one pass in
2.5 tokens. DAS measures the passes. With budgets that follow from them, that has a second fixed point: no answer is
drafted, because every answer is shorter than the undrafted longest.
"""

LEAST_SPREAD = 0.2
"""Minimum spread of log lengths. Less than 22 % was never measured, and zero would make every estimate certain."""

UNKNOWN_SHARE, ENOUGH = 0.2, 8
"""Default between-prompt share of the spread, and the prompts' worth of second answers that replace it."""

SHORT, MEDIUM, LONG = 0, 1, 2


class LengthClasses(NamedTuple):
    """DAS 4.2: short is below `short_tokens`, the passes that a step is meant to take; medium is below
    `medium_tokens`.
    """

    short_tokens: float
    medium_tokens: float
    starts: tuple[tuple[int, int], ...]  # by first class: answer tokens from which one counts as medium, as long
    typical_tokens: tuple[int, int, int]  # median length of each class

    def of(self, tokens: int) -> int:
        return (tokens >= self.short_tokens) + (tokens >= self.medium_tokens)

    def first(self, lengths: Sequence[int]) -> int:
        """Returns the commonest class of a prompt's answers; ties go to the longer. Long without any: a potential
        straggler.
        """
        counts = [0, 0, 0]
        for tokens in lengths:
            counts[self.of(tokens)] += 1
        return max((LONG, MEDIUM, SHORT), key=counts.__getitem__)


class BatchLengths(NamedTuple):
    """Known lengths in a batch. `answers`: number of answers counted."""

    answers: int
    mean_log: float
    spread_log: float  # standard deviation
    between_share: float  # between-prompt share of the variance
    classes: LengthClasses


def batch_lengths(prompts: Sequence[tuple[tuple, Sequence[int]]], max_tokens: int) -> BatchLengths:
    """Returns the summary of each prompt's past lengths (a tuple per epoch, newest first) and finished ones, in
    tokens.
    """
    pools = [[*(tokens for epoch in past for tokens in epoch), *finished] for past, finished in prompts]
    pools = [pool for pool in pools if pool]
    epochs = max((len(past) for past, _ in prompts), default=0)
    longest = [max((max(past[n], default=0) for past, _ in prompts if n < len(past)), default=0) for n in range(epochs)]
    longest = [tokens for tokens in longest if tokens] or [max((f[-1] for _, f in prompts if f), default=max_tokens)]
    classes = length_classes(pools, sum(longest) / len(longest), max_tokens)
    if not pools:
        return BatchLengths(0, 0.0, 1.0, UNKNOWN_SHARE, classes)
    sizes = np.array([len(pool) for pool in pools])
    logs = np.log(np.maximum(np.concatenate(pools), 1))
    spread = max(float(logs.std()), LEAST_SPREAD)
    return BatchLengths(len(logs), float(logs.mean()), spread, _between_share(logs, sizes), classes)


def _between_share(logs: np.ndarray, sizes: np.ndarray) -> float:
    """Returns the share by a one-way analysis of variance with groups of unequal size (method of moments), within 0.05
    to 0.9.
    """
    count, prompts = len(logs), len(sizes)
    if count - prompts < ENOUGH or prompts < 2:
        return UNKNOWN_SHARE
    sums = np.add.reduceat(logs, np.cumsum(sizes) - sizes)
    explained = float(sums @ (sums / sizes))
    within = (float(logs @ logs) - explained) / (count - prompts)
    typical_size = (count - float(sizes @ sizes) / count) / (prompts - 1)
    between = ((explained - logs.sum() ** 2 / count) / (prompts - 1) - within) / typical_size
    return min(max(between / (between + within), 0.05), 0.9) if between > 0 else 0.05


def length_classes(pools: Sequence[Sequence[int]], longest_tokens: float, max_tokens: int) -> LengthClasses:
    """Returns the classes. `pools`: known lengths of each prompt; `longest_tokens`: a step's longest answer, averaged
    over epochs.

    DAS 4.2: an answer is promoted when P(short | so far) < 0.4, and when P(long | so far) > 0.6, both by all answers to
    prompts whose first class is the same. In the second case that is P(not long | so far) < 0.4.
    """
    short = PASS_SHARE * longest_tokens
    medium = (short + max_tokens) / 2
    classes = LengthClasses(short, medium, (), (0, 0, 0))
    by_first: list[list[int]] = [[], [], []]
    by_class: list[list[int]] = [[], [], []]
    for pool in pools:
        by_first[classes.first(pool)] += pool
        for tokens in pool:
            by_class[classes.of(tokens)].append(tokens)
    typical = [sorted(known)[len(known) // 2] if known else 0 for known in by_class]
    guesses = (int(short), int((short + medium) / 2), max_tokens)
    medium_at = _start(sorted(by_first[SHORT]), short)
    late, early = (_start(sorted(by_first[first]), medium) for first in (SHORT, MEDIUM))
    starts = ((medium_at, max(medium_at, late)), (0, early), (0, 0))
    return LengthClasses(short, medium, starts, tuple(t or guess for t, guess in zip(typical, guesses, strict=True)))


def _start(pool: list[int], threshold: float) -> int:
    """Returns the answer tokens from which P(below `threshold` | longer than that) < 0.4, by the sorted lengths in
    `pool`.

    With k of the m answers no longer, that share is (B - k) / (m - k), B below the threshold: solved for the smallest
    k. An answer that reaches the threshold is certainly above it.
    """
    passed = max(0, (10 * bisect_left(pool, threshold) - 4 * len(pool)) // 6 + 1)
    sure = ceil(threshold)
    if passed > len(pool):
        return sure
    return min(pool[passed - 1], sure) if passed else 0
