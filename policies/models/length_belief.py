"""What is known about the length of an answer: a law of lengths, and beliefs given a prompt's history and its mates.

Every length has a normal score: its quantile under the law, as a standard normal number. `within` is the share of the
scores' variance among answers to one prompt; the rest is the prompt's level, which goes from epoch to epoch as an
autoregression of first order with correlation `persist`. A prompt's level is believed on a grid: its prior comes from
history and from a predictor, finished mates count by their density and running ones by their survival. Invariant: the
cost is a few numpy operations over all samples. Called by `policies.families.lengths` and by the core's books.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import erfc, log, sqrt
from typing import NamedTuple

import numpy as np

from tailrace.policies.protocol.views import BeliefView

REACH, PER_UNIT = 9.0, 200
"""Range and resolution of the table of survival: at 9 deviations it is 1e-19; the rounding is at most 2 % there."""

MIDDLE = REACH * PER_UNIT + 0.5
"""Place of a score of 0 in that table, and a half, so that cutting off the fraction rounds."""

PER_DEPTH = 2_000
"""Points of the inverse table for each unit of the root of a survival's negative log: a score is off by 0.003."""

KNOTS, TOP = 201, 5.0
"""Points of a law, between normal scores of -TOP and TOP: beyond those lies one answer of 3 million."""

GRID, GRID_SPAN = 21, 3.2
"""Points of a prompt's level, and the deviations that they reach: 31 points over 3.5 change a remainder by 0.1 %."""

PARTS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Quantiles whose mean is the mean remainder: against an integral, 2 % at a spread of 1."""

LEAST_WITHIN, MOST_WITHIN = 0.01, 0.97
"""Limits of `within`: RhymeRL has 0.02, the AMC trace 0.51; a share of 0 or 1 would be certain."""

USUAL_WITHIN = 0.5
"""`within` while no prompt has two answers: that of the AMC trace, the most cautious that was measured."""

USUAL_PERSIST, PERSIST_PROMPTS = 0.8, 8
"""`persist` before any prompt was seen in two epochs, and its weight in prompts."""

MOST_PERSIST = 0.995

FEW_ANSWERS = 32
"""Number of second answers to prompts below which `within` is the usual one."""

_SCORES = np.linspace(-REACH, REACH, int(2 * REACH * PER_UNIT) + 1)
_LOG_SURVIVAL = np.log(np.array([erfc(z / sqrt(2)) / 2 for z in _SCORES.tolist()]))
_DEPTHS = np.arange(int(sqrt(-_LOG_SURVIVAL[-1]) * PER_DEPTH) + 1) / PER_DEPTH
_SCORES_BEYOND = np.interp(-(_DEPTHS**2), _LOG_SURVIVAL[::-1], _SCORES[::-1])


def log_survival(scores: np.ndarray) -> np.ndarray:
    """Returns the log of the standard normal's survival at scores, of their shape."""
    return _LOG_SURVIVAL.take((scores * PER_UNIT + MIDDLE).astype(np.intp), mode="clip")


def score_beyond(log_survivals: np.ndarray) -> np.ndarray:
    """Returns the normal scores with these logs of survival, of their shape: the inverse of `log_survival`."""
    places = np.sqrt(np.maximum(-log_survivals, 0.0)) * PER_DEPTH + 0.5
    return _SCORES_BEYOND.take(places.astype(np.intp), mode="clip")


def normal_scores(count: int) -> np.ndarray:
    """Returns the normal scores of `count` values in rising order: f64[count]."""
    return score_beyond(np.log1p(-(np.arange(count) + 0.5) / count))


Known = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""Lengths of a prompt's answers: of earlier epochs, newest first, and of the present one."""


@dataclass(frozen=True, eq=False)
class LengthLaw:
    """`logs`, f64[KNOTS]: the log length at each normal score of `scores`, f64[KNOTS]; both rise."""

    scores: np.ndarray
    logs: np.ndarray
    within: float
    persist: float

    @classmethod
    def log_normal(cls, mean_log: float, spread_log: float, within: float, max_tokens: int) -> "LengthLaw":
        """Returns the log-normal law that ends at `max_tokens`."""
        scores = np.linspace(-TOP, TOP, KNOTS)
        return cls(scores, _risen(np.minimum(mean_log + spread_log * scores, log(max_tokens))), within, USUAL_PERSIST)

    @classmethod
    def of(cls, prompts: Sequence[Known], max_tokens: int, min_answers: int = FEW_ANSWERS) -> "LengthLaw | None":
        """Returns the law of all answers of the newest two epochs of these prompts, or None if there are fewer than
        `min_answers` (2 at least), or if answers have one token.

        Beyond the longest one it continues as steeply as its upper half, up to `max_tokens`.
        """
        pools = [pool for past, now in prompts for pool in (now, *past[:1]) if pool]
        lengths = np.log(np.maximum(np.sort(np.concatenate(pools)), 1)) if pools else np.zeros(0)
        if len(lengths) < min_answers or max_tokens < 2:
            return None
        at = normal_scores(len(lengths))
        scores = np.linspace(-TOP, TOP, KNOTS)
        logs = np.interp(scores, at, lengths)
        middle = (len(lengths) - 1) // 2
        slope = max((lengths[-1] - lengths[middle]) / (at[-1] - at[middle]), 1e-3)
        logs += slope * np.maximum(scores - at[-1], 0.0) - slope * np.maximum(at[0] - scores, 0.0)
        law = cls(scores, _risen(np.minimum(logs, log(max_tokens))), USUAL_WITHIN, USUAL_PERSIST)
        within = _within(law, pools)
        return cls(law.scores, law.logs, within, _persist(law, within, prompts))

    def score(self, tokens) -> np.ndarray:
        """Returns the normal scores of lengths, of their shape."""
        return np.interp(np.log(np.maximum(tokens, 1)), self.logs, self.scores)

    def tokens(self, scores: np.ndarray) -> np.ndarray:
        """Returns the lengths at normal scores, of their shape."""
        return np.exp(np.interp(scores, self.scores, self.logs))

    def level(self, history: Sequence[Sequence[int]]) -> tuple[float, float]:
        """Returns the mean and the variance of a prompt's level, by earlier epochs, newest first: 0 and 1 without."""
        mean, variance, between = 0.0, 1.0, 1.0 - self.within
        for epoch in reversed(history):
            if epoch:
                seen = float(self.score(epoch).mean()) / sqrt(between)
                gain = variance / (variance + self.within / len(epoch) / between)
                mean, variance = mean + gain * (seen - mean), variance * (1 - gain)
            mean, variance = mean * self.persist, self.persist**2 * variance + 1 - self.persist**2
        return mean, variance

    def predicted(self, level: tuple[float, float], score: float, quality: float) -> tuple[float, float]:
        """Returns a level's mean and variance, given also the normal score of a prediction for its prompt, and the
        correlation of such scores with those of answers.
        """
        mean, variance = level
        of_level = min(quality / sqrt(1.0 - self.within), MOST_PERSIST)
        if of_level <= 0.0:
            return level
        error = (1 - of_level**2) / of_level**2
        gain = variance / (variance + error)
        return mean + gain * (score / of_level - mean), variance * (1 - gain)


class Remainders(NamedTuple):
    """Tokens that samples still make, each f64[n] and 1 at least. `drawn`, f64[d, n]: what they may turn out to be."""

    mean: np.ndarray
    high: np.ndarray
    drawn: np.ndarray


def remainders(law: LengthLaw, view: BeliefView, quantile: float, draws: int = 0) -> Remainders:
    """Returns the mean remainder of each sample, a quantile of it, and `draws` draws by fixed fractions.

    In a draw, a prompt's level is the same for all its samples.
    """
    group = view.group
    between, own = sqrt(1 - law.within), sqrt(law.within)
    at = np.where(view.made > 1, law.score(view.made), -REACH)
    mean, variance = _levels(law, view, at)
    middle, width = between * mean[group], np.sqrt(law.within + (1 - law.within) * variance)[group]
    beyond = log_survival((at - middle) / width)
    parts = [_left(law, view, middle, width, beyond, part) for part in PARTS]
    high = parts[PARTS.index(quantile)] if quantile in PARTS else _left(law, view, middle, width, beyond, quantile)
    drawn = []
    for turn in range(draws):
        levels = mean + np.sqrt(variance) * score_beyond(np.log1p(-_fractions(len(mean), turn)))
        of_group = between * levels[group]
        beyond = log_survival((at - of_group) / own)
        drawn.append(_left(law, view, of_group, own, beyond, _fractions(len(at), turn + 0.5)))
    return Remainders(sum(parts) / len(parts), high, np.array(drawn).reshape(draws, len(at)))


def _levels(law: LengthLaw, view: BeliefView, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and variance of each prompt's level, f64[groups]. `at`: normal scores of what samples have made."""
    between, spread = sqrt(1 - law.within), np.sqrt(np.maximum(view.level_variance, 1e-6))
    steps = np.linspace(-GRID_SPAN, GRID_SPAN, GRID)
    levels = view.level_mean[:, None] + spread[:, None] * steps
    weights = np.repeat(-0.5 * steps[None] ** 2, len(levels), axis=0)
    own = between * levels
    if len(view.finished):
        scores = law.score(view.finished)
        count = np.bincount(view.finished_group, minlength=len(levels))[:, None]
        total = np.bincount(view.finished_group, scores, minlength=len(levels))[:, None]
        weights -= (count * own**2 - 2 * own * total) / (2 * law.within)
    alive = np.flatnonzero(view.made > 1)
    if len(alive):
        of, unit = view.group[alive], PER_UNIT / sqrt(law.within)
        places = (unit * at[alive] + MIDDLE)[:, None] - (unit * own).take(of, axis=0)  # as `log_survival`, in one pass
        seen = _LOG_SURVIVAL.take(places.astype(np.intp), mode="clip")
        first = np.flatnonzero(np.r_[True, of[1:] != of[:-1]])
        weights[of[first]] += np.add.reduceat(seen, first, axis=0)
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    mean = (weights * levels).sum(axis=1)
    return mean, (weights * (levels - mean[:, None]) ** 2).sum(axis=1)


def _left(law: LengthLaw, view: BeliefView, middle, width, beyond: np.ndarray, part) -> np.ndarray:
    """Returns the remainder that a sample does not exceed with chance `part`, given that it got as far as it did."""
    scores = middle + width * score_beyond(beyond + np.log1p(-np.asarray(part)))
    return np.maximum(np.minimum(law.tokens(scores), view.max_tokens) - view.made, 1.0)


def _fractions(count: int, turn: float) -> np.ndarray:
    """Returns `count` numbers between 0 and 1 that fill it evenly, others in each turn."""
    return np.clip((np.arange(count) * 0.6180339887498949 + turn * 0.3819 + 0.5) % 1.0, 1e-6, 1 - 1e-6)


def _risen(logs: np.ndarray) -> np.ndarray:
    """Returns the same, made to rise strictly: lengths at `max_tokens` are many, and an inverse is needed."""
    return np.maximum.accumulate(logs) + 1e-9 * np.arange(len(logs))


def _within(law: LengthLaw, pools: Sequence[Sequence[int]]) -> float:
    sizes = np.array([len(pool) for pool in pools])
    free = int(sizes.sum()) - len(sizes)
    if free < FEW_ANSWERS:
        return USUAL_WITHIN
    scores, first = law.score(np.concatenate(pools)), np.cumsum(sizes) - sizes
    means = np.add.reduceat(scores, first) / sizes
    inside = float(((scores - np.repeat(means, sizes)) ** 2).sum()) / free
    return min(max(inside / max(float(scores.var()), 1e-9), LEAST_WITHIN), MOST_WITHIN)


def _persist(law: LengthLaw, within: float, prompts: Sequence[Known]) -> float:
    """Returns the correlation of prompts' levels in successive epochs, from those with two of them."""
    total = count = 0.0
    for past, now in prompts:
        epochs = [epoch for epoch in (now, *past) if epoch]
        means = [float(law.score(epoch).mean()) for epoch in epochs]
        total += sum(new * old for new, old in pairwise(means))
        count += max(len(means) - 1, 0)
    total = total / max(1.0 - within, 1e-3) + PERSIST_PROMPTS * USUAL_PERSIST
    return min(max(total / (count + PERSIST_PROMPTS), 0.0), MOST_PERSIST)


def ranked(numbers: Sequence[float]) -> np.ndarray:
    """Returns the normal score of each number by its rank among all: f64[n]. Equal ones share theirs."""
    _, place, counts = np.unique(np.asarray(numbers, float), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return score_beyond(np.log1p(-(ends - counts / 2) / max(len(numbers), 1)))[place]
