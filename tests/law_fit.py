"""From lengths that were seen to a law, and how well the law has what was seen.

The body is fitted by the moments of the logs below max_tokens, corrected for the cut; correlations by the variance of
normal scores (a length's rank in its epoch) between and within prompts. The law describes the newest epoch. `measured`
and `modelled` are the same figures of what was seen and of a draw from the law, so that a fit can be judged.
Called by tests, for the figures that scenarios rest on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tailrace.lab.simulator.laws import NORMAL, Law, draw

EPOCHS = Mapping[str, Sequence[Sequence[int]]]
"""Lengths in tokens of every prompt, oldest epoch first; in an epoch every prompt has as many answers."""

RANKS = 8
"""Ranking groups in the figure of RhymeRL's table 2 that a fit reports."""


DRAWN = 20000
"""Answers an epoch that a fitted law is judged by."""


@dataclass(frozen=True, slots=True)
class LengthFit:
    law: Law
    measured: dict[str, float]
    modelled: dict[str, float]
    distance: float
    """Kolmogorov and Smirnov's: the most that the law's and the newest epoch's shares below a length differ."""


def fit(epochs: EPOCHS, max_tokens: int, seed: int = 0) -> LengthFit:
    """The law of these prompts. Raises ValueError for fewer than two prompts or answers each, or all at the cap."""
    rows = [np.minimum(row, max_tokens) for row in zip(*epochs.values(), strict=True)]
    newest = rows[-1]
    below = newest[newest < max_tokens]
    if min(newest.shape) < 2 or not len(below) or below.min() < 1:
        raise ValueError("a law is fitted to two prompts or more with two answers or more each, of a token or more")
    logs = np.log(below)
    mean, spread = _uncut(float(logs.mean()), max(float(logs.std()), 1e-3), math.log(max_tokens))
    scores = [_scores(row) for row in rows]
    levels = [_level_variance(row) for row in scores]
    shared = [_covariance(a, b) / math.sqrt(u * v) for (a, u), (b, v) in pairwise(zip(scores, levels, strict=True))]
    law = Law(
        median_tokens=math.exp(mean),
        spread=spread,
        max_tokens=max_tokens,
        within=1 - min(float(np.mean(levels)), 1.0),
        persist=min(max(float(np.mean(shared)), 0.0), 1.0) if shared else 0.0,
        at_cap=1 - len(below) / newest.size,
    )
    groups = draw(law, max(DRAWN // newest.shape[1], 2), newest.shape[1], len(rows) - 1, seed)
    drawn = [
        np.array(row) for row in zip(*((*group.past_lengths[::-1], group.lengths) for group in groups), strict=True)
    ]
    return LengthFit(law, _figures(rows), _figures(drawn), _distance(law, np.sort(newest, axis=None)))


def rank_stability(past: Sequence[Sequence[int]], now: Sequence[Sequence[int]], ranks: int) -> float:
    """RhymeRL 6.1: of all answers, the share whose ranking group is no higher than the median of their prompt's answers
    of the previous epoch said. Ranking groups are equal parts of all answers by length."""
    told = _ranking_groups(np.repeat(np.median(np.asarray(past), axis=1), np.shape(now)[1]), ranks)
    return float((_ranking_groups(np.ravel(now), ranks) <= told).mean())


def _ranking_groups(lengths: np.ndarray, ranks: int) -> np.ndarray:
    places = np.empty(len(lengths), int)
    places[np.argsort(lengths, kind="stable")] = np.arange(len(lengths))
    return places * ranks // len(lengths)


def _uncut(mean: float, spread: float, cap: float) -> tuple[float, float]:
    """Mean and spread of the normal that, cut at `cap`, has these. Below it lies Phi(k) of it, k = (cap - m) / s, with
    h = phi(k) / Phi(k): mean m - s h, variance s^2 (1 - k h - h^2)."""
    m, s = mean, spread
    for _ in range(200):
        k = (cap - m) / s
        h = NORMAL.pdf(k) / max(NORMAL.cdf(k), 1e-12)
        s = spread / math.sqrt(max(1 - k * h - h * h, 0.05))
        m = mean + s * h
    return m, s


def _scores(row: np.ndarray) -> np.ndarray:
    """Normal scores of an epoch's lengths by their rank, of variance 1; equal lengths share the mean of their ranks."""
    _, places, counts = np.unique(row, return_inverse=True, return_counts=True)
    shares = ((np.cumsum(counts) - counts / 2) / row.size).tolist()
    scores = np.array([NORMAL.inv_cdf(share) for share in shares])[places.reshape(row.shape)]
    return (scores - scores.mean()) / scores.std()


def _level_variance(scores: np.ndarray) -> float:
    """Of prompts' levels: what the means vary by beyond what the answers' own variance accounts for."""
    own = scores.var(axis=1, ddof=1).mean() / scores.shape[1]
    return max(float(scores.mean(axis=1).var(ddof=1) - own), 1e-6)


def _covariance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.cov(one.mean(axis=1), other.mean(axis=1))[0, 1])


def _figures(rows: Sequence[np.ndarray]) -> dict[str, float]:
    newest = rows[-1]
    shares = {f"p{share}_tokens": float(np.percentile(newest, share)) for share in (10, 50, 90, 99)}
    found = {"mean_tokens": float(newest.mean()), **shares, "between_share": _level_variance(_scores(newest))}
    if len(rows) > 1:
        found["rank_stability"] = rank_stability(rows[-2], newest, RANKS)
    return {name: round(value, 4) for name, value in found.items()}


def _distance(law: Law, lengths: np.ndarray) -> float:
    below = np.searchsorted(lengths, np.unique(lengths), side="right") / len(lengths)
    modelled = [law.share_within(int(tokens)) for tokens in np.unique(lengths)]
    return round(float(np.abs(below - modelled).max()), 4)
