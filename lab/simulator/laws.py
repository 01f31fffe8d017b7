"""Lengths of answers: a log-normal body cut at max_tokens, a share that runs into it, correlation within a prompt.

Each answer has a normal score: sqrt(1 - within) of it is its prompt's, sqrt(within) its own; the law turns the score's
quantile into tokens, so the lengths follow the law whatever is correlated. A prompt's level goes from epoch to epoch
as a stationary autoregression of first order. Invariant: what is drawn of a group in an epoch is a function of (seed,
group, epoch) alone: more groups, samples, epochs or steps change none of it. Called by scenarios and benchmarks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import NormalDist

import numpy as np

from tailrace.lab.simulator.types import Gap, WorkloadGroup

NORMAL = NormalDist()
LEAST_SPREAD, MOST_SPREAD = 0.02, 3.0
"""Limits of the spread of log lengths for `solve`: e ** 3 is a factor of 20 for one standard deviation."""


@dataclass(frozen=True, slots=True)
class Law:
    """Lengths in tokens. Raises ValueError for figures out of range.

    `median_tokens` and `spread` (standard deviation of log lengths) are the body's before it is cut at `max_tokens`;
    `at_cap` is the share of answers that max_tokens ends; `within`, the share of the scores' variance inside a prompt;
    `persist`, the correlation of a prompt's level with its next epoch's; `predictability_spread`, the standard
    deviation of the log odds factor by which a group's drafts are likelier to be right than the average group's.
    """

    median_tokens: float
    spread: float
    max_tokens: int
    within: float
    persist: float
    at_cap: float = 0.0
    predictability_spread: float = 0.0

    def __post_init__(self):
        if min(self.median_tokens, self.spread, self.max_tokens) <= 0 or self.predictability_spread < 0:
            raise ValueError(f"lengths and spreads of a law must be positive: {self}")
        if not (0 <= self.within <= 1 and 0 <= self.persist <= 1 and 0 <= self.at_cap < 1):
            raise ValueError(f"shares of a law lie within 0 to 1: {self}")

    @property
    def cut(self) -> float:
        """Returns max_tokens as a normal score of the uncut body."""
        return math.log(self.max_tokens / self.median_tokens) / self.spread

    def quantile(self, share: float) -> float:
        """Returns the tokens that `share` of the answers do not exceed."""
        return self._quantile(share, 0.0, NORMAL.cdf(self.cut))

    def lengths(self, scores: Sequence[float], growth: float = 0.0) -> tuple[int, ...]:
        """Returns the lengths of answers with these normal scores, if the uncut body is e ** growth times as long: 1 to
        max_tokens.
        """
        below = NORMAL.cdf(self.cut - growth / self.spread)
        return tuple(max(round(self._quantile(NORMAL.cdf(score), growth, below)), 1) for score in scores)

    def _quantile(self, share: float, growth: float, below: float) -> float:
        """`below`: the share of the uncut body below max_tokens."""
        if share >= 1 - self.at_cap:
            return float(self.max_tokens)
        score = NORMAL.inv_cdf(min(max(share / (1 - self.at_cap) * below, 1e-300), 1 - 1e-16))
        return min(self.median_tokens * math.exp(growth + self.spread * score), float(self.max_tokens))

    def share_within(self, tokens: float) -> float:
        """Returns the share of the answers that this many tokens are enough for: the inverse of `quantile`."""
        if tokens >= self.max_tokens:
            return 1.0
        score = math.log(tokens / self.median_tokens) / self.spread
        return (1 - self.at_cap) * NORMAL.cdf(score) / NORMAL.cdf(self.cut)

    def mean(self) -> float:
        """Returns the mean tokens of an answer: E[exp(m + s z) | z < k] = exp(m + s^2 / 2) Phi(k - s) / Phi(k)."""
        body = math.exp(self.spread**2 / 2) * NORMAL.cdf(self.cut - self.spread) / NORMAL.cdf(self.cut)
        return (1 - self.at_cap) * self.median_tokens * body + self.at_cap * self.max_tokens


def solve(
    max_tokens: int,
    *,
    mean_tokens: float | None = None,
    spread: float | None = None,
    quantiles: Mapping[float, float] | None = None,
    at_cap: float = 0.0,
) -> tuple[float, float]:
    """Returns (median_tokens, spread) of the law with two published figures: of mean, spread and quantiles {share:
    tokens}.

    Raises ValueError unless there are just two, one of them a level, or if no law has both.
    """
    points = sorted((quantiles or {}).items(), key=lambda point: abs(point[0] - 0.5))
    if (mean_tokens is not None) + (spread is not None) + len(points) != 2 or (mean_tokens is None and not points):
        raise ValueError("two figures fix a length law: mean_tokens or a quantile, and spread or another quantile")

    def law(median: float, width: float) -> Law:
        return Law(median_tokens=median, spread=width, max_tokens=max_tokens, within=1.0, persist=0.0, at_cap=at_cap)

    share, level = points[0] if mean_tokens is None else (None, mean_tokens)

    def median_at(width: float) -> float:
        def excess(log_median: float) -> float:
            found = law(math.exp(log_median), width)
            return (found.mean() if share is None else found.quantile(share)) - level

        return math.exp(_root(excess, 0.0, math.log(max_tokens) + 5 * width, "the first figure"))

    if spread is None:
        at, tokens = points[-1]
        spread = _root(
            lambda width: law(median_at(width), width).quantile(at) - tokens,
            LEAST_SPREAD, MOST_SPREAD, f"{tokens} tokens at quantile {at}",
        )  # fmt: skip
    return median_at(spread), spread


def _root(excess, low: float, high: float, what: str) -> float:
    """Returns the place at which a monotone function is 0, by bisection. ValueError names `what` if there is none."""
    rises = excess(high) > 0
    if (excess(low) > 0) == rises:
        raise ValueError(f"no length law has {what}")
    for _ in range(60):
        middle = (low + high) / 2
        if (excess(middle) > 0) == rises:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def draw(
    law: Law, groups: int, samples: int, epochs: int, seed: int, prompt_tokens: int = 0
) -> tuple[WorkloadGroup, ...]:
    """Draws `groups` prompts with `samples` answers each, and those of `epochs` earlier epochs, newest first."""
    return draw_steps(law, groups, samples, 1, 0.0, seed, epochs, prompt_tokens)[0]


def draw_steps(
    law: Law, groups: int, samples: int, steps: int, drift: float, seed: int, epochs: int = 1, prompt_tokens: int = 0
) -> tuple[tuple[WorkloadGroup, ...], ...]:
    """Draws the same prompts in `steps` steps, each an epoch later; log lengths grow by `drift` a step (0.007 in
    RhymeRL's figure 3a). Each step knows the lengths of the `epochs` epochs before it, newest first; the law holds at
    step 0.
    """
    rows = [_group_steps(law, f"g{n:05d}", samples, steps, drift, seed, epochs, prompt_tokens) for n in range(groups)]
    return tuple(zip(*rows, strict=True))


def _group_steps(law: Law, group_id, samples, steps, drift, seed, epochs, prompt_tokens) -> list[WorkloadGroup]:
    streams = {epoch: _stream(seed, f"{group_id}/{epoch}") for epoch in range(-epochs, steps)}
    levels = dict(_levels(law.persist, {epoch: float(stream.standard_normal()) for epoch, stream in streams.items()}))
    between, own = math.sqrt(1 - law.within), math.sqrt(law.within)
    lengths = {
        epoch: law.lengths((between * levels[epoch] + own * stream.standard_normal(samples)).tolist(), drift * epoch)
        for epoch, stream in streams.items()
    }
    odds = math.exp(law.predictability_spread * _stream(seed, f"{group_id}/predictability").standard_normal())
    return [
        WorkloadGroup(group_id, prompt_tokens, lengths[n], tuple(lengths[n - k] for k in range(1, epochs + 1)), odds)
        for n in range(steps)
    ]


def with_gaps(
    groups: tuple[WorkloadGroup, ...],
    step: int,
    turns: int,
    tool_s: float,
    spread: float,
    outside_tokens: int,
    seed: int,
) -> tuple[WorkloadGroup, ...]:
    """Divides the samples into `turns` turns, or one for each token of shorter ones: their ends are drawn evenly, the
    seconds of each tool (mean `tool_s`) and its tokens (mean `outside_tokens`) from log-normal laws of this spread.
    """
    return tuple(
        replace(
            group,
            gaps=tuple(
                _gaps(
                    length, turns, (tool_s, outside_tokens), spread, _stream(seed, f"{group.group_id}/{step}/{i}/turns")
                )
                for i, length in enumerate(group.lengths)
            ),
        )
        for group in groups
    )


def _gaps(length: int, turns: int, means: tuple[float, float], spread: float, stream: np.random.Generator):
    count = min(turns, length) - 1
    ends = np.sort(stream.choice(np.arange(1, length), count, replace=False)).tolist() if count else []
    tools, tokens = (mean * np.exp(spread * stream.standard_normal(count) - spread**2 / 2) for mean in means)
    return tuple(Gap(*gap) for gap in zip(ends, tools.tolist(), tokens.round().astype(int).tolist(), strict=True))


def _levels(persist: float, noise: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Yields (epoch, level), walking from epoch 0 both ways: the autoregression is reversible, so neither end
    matters.
    """
    for direction in (1, -1):
        epoch, level = 0, noise[0]
        while epoch in noise:
            yield epoch, level
            epoch += direction
            level = persist * level + math.sqrt(1 - persist**2) * noise.get(epoch, 0.0)


def _stream(seed: int, name: str) -> np.random.Generator:
    key = blake2b(f"{seed}\0{name}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
