"""Speeds of this replica, measured at work: one running regression of step times, and one of pulls.

Invariant: every figure comes from steps and pulls of this engine. Old ones fade (FADE per observation), so a figure
follows the machine. Fed by the stepper, reported in EngineStats, used by `cost_aware` placement.
"""

import numpy as np

FADE = 0.995
"""Weight of an observation 140 steps ago is one half: a few seconds of decoding."""


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
        """Weights, f64[n]. The ridge towards the guess decides where observations do not."""
        ridge = np.diag(np.maximum(1e-6, 1e-3 * np.diag(self._xx)))
        solved = np.linalg.solve(self._xx + ridge, self._xy + ridge @ self._guess)
        return np.maximum(solved, 1e-9)


class SpeedEstimator:
    """Step: base + per_chunk * chunks + per_token * tokens beyond one per chunk. Pull: base + per_token * tokens.

    The reported share of a chunk in a decode step includes the mean draft tokens verified per chunk lately.
    """

    def __init__(self):
        self._steps = FadedFit([0.0, 0.0, 0.0])
        self._pulls = FadedFit([0.0, 0.0])
        self._pulled = False
        self._drafted = self._decoded = 0.0  # draft tokens, and chunks, of decode steps, faded

    def step(self, chunks: int, tokens: int, took_s: float, decodes: bool) -> None:
        """Note a step of `tokens` tokens for `chunks` chunks. `decodes`: one token of each, the others drafts."""
        self._steps.observe([1.0, chunks, tokens - chunks], took_s)
        if decodes:
            self._drafted = FADE * self._drafted + tokens - chunks
            self._decoded = FADE * self._decoded + chunks

    def pull(self, tokens: int, took_s: float) -> None:
        """Note a load of `tokens` tokens from the pool."""
        self._pulled = True
        self._pulls.observe([1.0, tokens], took_s)

    def report(self) -> dict[str, float] | None:
        """Returns the measured fields of `policies.protocol.events.ReplicaMeasured`, or None before the first pull."""
        if not self._pulled:
            return None
        base_s, per_chunk_s, per_token_s = self._steps.weights.tolist()
        fetch_base_s, fetch_token_s = self._pulls.weights.tolist()
        drafts = self._drafted / self._decoded if self._decoded else 0.0
        return {
            "prefill_tokens_s": 1 / per_token_s,
            "fetch_tokens_s": 1 / fetch_token_s,
            "fetch_base_s": fetch_base_s,
            "step_base_s": base_s,
            "step_per_chunk_s": per_chunk_s + drafts * per_token_s,
        }
