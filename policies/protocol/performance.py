"""The measured performance of one replica: one record, with the fade, the prior and the meaning of "tested".

Measured by `policies.models.performance_estimator`, in the engine; sent in its report and in `ReplicaMeasured`. Read by
placement, tail, racing, lanes, `draft_models`, `histo_pipe` and the core's books. Invariant: it holds only
measurements. Each has its age, in seconds at `observed_at`, and a figure of 0 without one means that nothing was
measured.

A draft token is tested if all drafts before it were right: the right ones and the first wrong one, verified or
overtaken. The share of right ones among the tested is therefore the chance that a draft is right if all before it are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FADE = 0.99
"""Fade of every figure: the weight of an observation 69 observations of the same kind ago is one half."""

PRIOR, PRIOR_TOKENS = 0.5, 8.0
"""Prior of every chance: that of a draft token before any was tested, and its weight in tested draft tokens."""


def count_tested(accepted, drafted):
    """Returns the tested tokens of drafts of `drafted` tokens whose first `accepted` were right; integers or arrays of
    them.
    """
    return accepted + (accepted < drafted)


def chance(right: float, of_tested: float, prior: float = PRIOR) -> float:
    """Returns the chance that a draft token is right, by the tested ones and a prior."""
    return (PRIOR_TOKENS * prior + right) / (PRIOR_TOKENS + of_tested)


def seconds_at(tokens: float, points: Sequence[float], seconds: Sequence[float]) -> float:
    """Returns the seconds on the line through points: flat below the first, and beyond the last along the last piece.

    As `StepCost.at`, for one number and without arrays: the core calls it at every placement.
    """
    if tokens <= points[0]:
        return seconds[0]
    upper = min(bisect_left(points, tokens), len(points) - 1)
    x, y = points[upper - 1], seconds[upper - 1]
    return y + (seconds[upper] - y) / (points[upper] - x) * (tokens - x)


@dataclass(frozen=True, slots=True)
class MethodAcceptance:
    """Draft tokens of one method on a replica, faded."""

    method: str
    right: float
    tested: float
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Performance:
    """Performance as of `observed_at`. A decode step of n tokens for c chunks takes `step_seconds` at n, and `chunk_s`
    * c more.

    `context_token_s`: seconds that a token of context adds to a step; the figures above hold at `context_tokens` of it
    a chunk. `drafts`, `made`: recent means of a chunk's draft tokens in a step, and of the tokens that it made. A fetch
    of n tokens of KV takes `fetch_base_s` + n `fetch_token_s` (0: the replica cannot fetch), beside the step that runs
    meanwhile. `drafter_seconds`: seconds of a draft model's step, by its samples. `start_s`: seconds that the replica
    took to start.
    """

    observed_at: float
    step_tokens: tuple[float, ...]
    step_seconds: tuple[float, ...]
    chunk_s: float = 0.0
    drafts: float = 0.0
    made: float = 1.0
    step_age_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_age_s: float = 0.0
    fetch_base_s: float = 0.0
    fetch_token_s: float = 0.0
    fetch_age_s: float = 0.0
    acceptance: tuple[MethodAcceptance, ...] = ()
    drafter_samples: tuple[float, ...] = ()
    drafter_seconds: tuple[float, ...] = ()
    drafter_age_s: float = 0.0
    start_s: float = 0.0
    context_token_s: float = 0.0
    context_tokens: float = 0.0

    @classmethod
    def linear(cls, observed_at: float, base_s: float, chunk_s: float, **others) -> "Performance":
        """Returns the performance of a replica whose decode step takes base_s + chunk_s * chunks."""
        return cls(observed_at, (1.0, 2.0), (base_s + chunk_s, base_s + 2 * chunk_s), **others)

    def verify_s(self, chunks: float, tokens: float) -> float:
        """Returns the seconds of a decode step of `tokens` tokens for `chunks` chunks."""
        return seconds_at(tokens, self.step_tokens, self.step_seconds) + self.chunk_s * chunks

    def step_s(self, chunks: float) -> float:
        """Returns the seconds of a decode step of `chunks` chunks, with the recent number of drafts."""
        return self.verify_s(chunks, chunks * (1.0 + self.drafts))

    def token_s(self, chunks: float) -> float:
        """Returns the seconds in which each of `chunks` chunks makes a token: a step makes several."""
        return self.step_s(chunks) / self.made

    def line(self, chunks: int) -> tuple[float, float]:
        """Returns the seconds of a step without chunks, and of each chunk: the line through steps of one chunk and of
        `chunks`.
        """
        one_s = self.step_s(1)
        each_s = (self.step_s(max(2, chunks)) - one_s) / (max(2, chunks) - 1)
        return one_s - each_s, each_s

    def move_s(self, context_tokens: int) -> float:
        """Returns the seconds until a chunk's KV is here: computed or fetched, whichever is faster; 0 if neither was
        measured.
        """
        compute_s = context_tokens * self.prefill_token_s
        if not self.fetch_token_s:
            return compute_s
        fetch_s = self.fetch_base_s + context_tokens * self.fetch_token_s
        return min(compute_s, fetch_s) if self.prefill_token_s else fetch_s
