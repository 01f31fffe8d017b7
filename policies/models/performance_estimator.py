"""Measures a replica's performance: takes steps, prompts, pulls and drafts, returns a `Performance`.

Invariant: every figure comes from observations of this replica, faded per observation of its kind, so that a rare one
(a prompt, a pull) is not forgotten between many decode steps. Fed by the stepper, its pool client, its drafts and their
draft models; pure, since the time is an argument.
"""

import numpy as np

from tailrace.policies.models.acceptance_estimator import AcceptanceEstimator
from tailrace.policies.models.context_cost import ContextCost
from tailrace.policies.models.step_cost_estimator import StepCostEstimator
from tailrace.policies.protocol.performance import FADE, Performance


class FadedFit:
    """Least-squares fit of y = x @ weights, with faded observations. Weights are never below 0.

    `guess` is worth one observation of each kind.
    """

    def __init__(self, guess: list[float]):
        self._guess = np.asarray(guess)
        n = len(guess)
        self._xx, self._xy = np.zeros((n, n)), np.zeros(n)

    def observe(self, x: list[float], y: float) -> None:
        row = np.asarray(x)
        self._xx = FADE * self._xx + np.outer(row, row)
        self._xy = FADE * self._xy + y * row

    @property
    def weights(self) -> np.ndarray:
        """Returns the weights, f64[n]. The ridge towards the guess decides if observations do not."""
        ridge = np.diag(np.maximum(1e-6, 1e-3 * np.diag(self._xx)))
        solved = np.linalg.solve(self._xx + ridge, self._xy + ridge @ self._guess)
        return np.maximum(solved, 1e-9)


class PerformanceEstimator:
    """`steps`, `drafter_steps`: the cost of steps here and of a draft model's. `acceptance`: drafts by method."""

    def __init__(self):
        self.steps, self.drafter_steps = StepCostEstimator(), StepCostEstimator()
        self.acceptance, self._context = AcceptanceEstimator(), ContextCost()
        self.start_s = 0.0  # seconds that the replica took to start; its owner sets it
        self._chunks = self._drafts = self._made = 0.0  # sums over decode steps, faded
        self._prompt_tokens = self._prompt_s = 0.0  # faded
        self._pulls = FadedFit([0.0, 0.0])
        self._at_s: dict[str, float] = {}  # time of the last observation, by kind

    def step(self, chunks: int, tokens: int, took_s: float, made: int, now_s: float, context_tokens: int = 0) -> None:
        """Records a step that verified `tokens` tokens (0: it was no decode step) and made `made`, for `chunks`
        chunks with `context_tokens` of context together (0: not known).
        """
        if not (tokens and chunks):
            return
        self.steps.record(tokens, took_s, chunks)
        if context_tokens:
            self._context.record(tokens, chunks, context_tokens, took_s)
        self._chunks = FADE * self._chunks + chunks
        self._drafts = FADE * self._drafts + max(0, tokens - chunks)
        self._made = FADE * self._made + made
        self._at_s["step"] = now_s

    def prompt(self, chunks: int, tokens: int, took_s: float, now_s: float) -> None:
        """Records a step of `tokens` tokens for `chunks` chunks, some of them at their prompts."""
        if tokens <= chunks:
            return
        cost = self.steps.cost(chunks)
        decoding_s = float(cost.at(chunks)) if cost is not None else 0.0
        self._prompt_tokens = FADE * self._prompt_tokens + tokens - chunks
        self._prompt_s = FADE * self._prompt_s + max(0.0, took_s - decoding_s)
        self._at_s["prompt"] = now_s

    def pull(self, tokens: int, took_s: float, now_s: float) -> None:
        """Records a load of `tokens` tokens from the pool."""
        self._pulls.observe([1.0, tokens], took_s)
        self._at_s["pull"] = now_s

    def drafter_step(self, samples: int, took_s: float, now_s: float) -> None:
        """Records a step of a draft model, one token of each of its samples."""
        self.drafter_steps.record(samples, took_s)
        self._at_s["drafter"] = now_s

    def report(self, now_s: float, observed_at: float) -> Performance | None:
        """Returns the record, or None before steps of two sizes were measured. `now_s`: on the clock of observations;
        `observed_at`: the same moment for the reader.
        """
        if (table := self.steps.table()) is None:
            return None
        tokens, seconds, chunk_s = table
        age_s = {kind: max(0.0, now_s - at_s) for kind, at_s in self._at_s.items()}
        drafter = self.drafter_steps.table() or ((), ())
        fetch_base_s, fetch_token_s = self._pulls.weights.tolist() if "pull" in age_s else (0.0, 0.0)
        prompts = self._prompt_tokens > 0
        return Performance(
            observed_at=observed_at,
            step_tokens=tokens,
            step_seconds=seconds,
            chunk_s=chunk_s,
            drafts=self._drafts / self._chunks if self._chunks else 0.0,
            made=max(1.0, self._made / self._chunks) if self._chunks else 1.0,
            step_age_s=age_s.get("step", 0.0),
            prefill_token_s=max(1e-9, self._prompt_s / self._prompt_tokens) if prompts else 0.0,
            prefill_age_s=age_s.get("prompt", 0.0),
            fetch_base_s=fetch_base_s,
            fetch_token_s=fetch_token_s,
            fetch_age_s=age_s.get("pull", 0.0),
            acceptance=self.acceptance.report(now_s),
            drafter_samples=drafter[0],
            drafter_seconds=drafter[1],
            drafter_age_s=age_s.get("drafter", 0.0),
            start_s=self.start_s,
            context_token_s=self._context.token_s(),
            context_tokens=self._context.of_chunk(),
        )
