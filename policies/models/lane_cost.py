"""Seconds that a replica takes for a set of samples, in closed form by its measured steps.

With remainders l, contexts x, and w drafts that make m(w) tokens a verification, a set takes N token times, N being the
longest remainder, or what room for KV or for chunks makes of the sum. Each lasts as a step of the mean number of chunks
at their mean context does, over m(w); w is what makes it shortest. Invariant: more work never takes less time. Called
by `policies.families.lanes`.
"""

from collections.abc import Sequence
from math import log2

import numpy as np

from tailrace.policies.protocol.performance import Performance
from tailrace.policies.protocol.views import LaneReplica

LOOKED_AT = 16
"""Number of replicas whose steps are averaged: more hardly change a mean of like machines."""

LIKE = 0.2
"""Relative difference of steps up to which replicas count as equally fast: busy machines measure that much noise."""

MOST_DRAFTS = 16
"""Number of drafts that are considered, at most, as `goodput` has by default."""

TOKENS = tuple(float(1 << power) for power in range(14))
"""Numbers of tokens at which steps of replicas are averaged."""

COMPARED = 8
"""Number of them, the smallest, at which replicas are compared."""

OWN_SHARE = 0.1
"""Share of a measured step that is its own at least, without its context: the seconds of a token of context are
measured with noise, and a step that stalled can make them more than the whole step.
"""

PER_DOUBLING, LEAST_POWER, MOST_POWER = 4, -4, 13
"""Points of the table by chunks for each doubling of them, from 1 / 16 to 8,192 chunks on average."""


class LaneCost:
    """Seconds on a replica of the mean speed. `speeds`: each replica's own seconds over those. The number of drafts is
    the best at each number of chunks of `context_tokens` each.
    """

    def __init__(
        self, replicas: Sequence[LaneReplica], chance: float, max_drafts: int, reserved_tokens: float,
        context_tokens: float,
    ):  # fmt: skip
        measured = [one.performance for one in replicas if one.performance is not None]
        chosen = measured[:: max(1, len(measured) // LOOKED_AT)][:LOOKED_AT]
        steps = _steps(chosen, TOKENS).mean(axis=0)
        self.speeds = _speeds([one.performance for one in replicas], steps[:COMPARED])
        self._kv = sum(one.kv_tokens for one in replicas) / len(replicas)
        self._least_room = 0.1 * self._kv
        self._most_running = sum(one.max_running for one in replicas) / len(replicas)
        self._reserved = reserved_tokens
        chunk_s = float(np.mean([one.chunk_s - one.context_token_s * one.context_tokens for one in chosen]))
        self._context_s = float(np.mean([one.context_token_s for one in chosen]))
        chunks = 2.0 ** (np.arange((MOST_POWER - LEAST_POWER) * PER_DOUBLING + 1) / PER_DOUBLING + LEAST_POWER)
        drafts = np.arange(1 + min(max_drafts, MOST_DRAFTS))
        made = np.cumsum(chance**drafts)
        tokens = np.maximum(chunks[:, None] * (1 + drafts), 1.0)
        steps = _steps(chosen, tokens).mean(axis=0)
        steps = np.maximum.accumulate(np.maximum(steps + (chunk_s * chunks)[:, None], OWN_SHARE * steps), axis=0)
        best = np.argmin((steps + (self._context_s * context_tokens * chunks)[:, None]) / made, axis=1)
        self._step_s = (steps[np.arange(len(chunks)), best] / made[best]).tolist()
        self._share = (1.0 / made[best]).tolist()
        self._last_place = len(self._step_s) - 2

    def seconds(self, longest: float, total: float, held: float, count: int) -> float:
        """Returns the seconds of `count` samples: `longest` and `total` of their remainders, and `held`, the sum of
        remainder times mean context, in tokens.
        """
        running = count if count < self._most_running else self._most_running
        room = self._kv - self._reserved * running
        room = room if room > self._least_room else self._least_room
        times = longest if longest * self._most_running > total else total / self._most_running
        if times * room < held:
            times = held / room
        at = (log2(total / times) - LEAST_POWER) * PER_DOUBLING
        place = int(at)
        if place > self._last_place:
            place = self._last_place
        elif at < 0.0:
            at, place = 0.0, 0
        part = at - place
        step_s, share = self._step_s, self._share
        step = step_s[place] + part * (step_s[place + 1] - step_s[place])
        return times * step + self._context_s * held * (share[place] + part * (share[place + 1] - share[place]))


def _steps(performances: Sequence[Performance], tokens) -> np.ndarray:
    """Returns the seconds of each replica's steps of this many tokens, above 0, without a chunk's own: f64[replicas] of
    the shape of `tokens`.

    As `StepCost.at`, for reports that need not be those of a measured curve.
    """
    tokens = np.asarray(tokens)
    most, seconds = tokens.max(), np.empty((len(performances), *tokens.shape))
    for place, one in enumerate(performances):
        x, y = one.step_tokens, one.step_seconds
        seconds[place] = np.interp(tokens, x, y)
        if most > x[-1]:
            seconds[place] += (y[-1] - y[-2]) / (x[-1] - x[-2]) * np.maximum(tokens - x[-1], 0.0)
    return np.maximum(seconds, 1e-9, out=seconds)


def _speeds(performances: Sequence[Performance | None], steps: np.ndarray) -> list[float]:
    """Returns each replica's seconds over `steps`, by the first of TOKENS; 1 within LIKE, and of one not measured."""
    known = [place for place, one in enumerate(performances) if one is not None]
    speeds = np.ones(len(performances))
    speeds[known] = (_steps([performances[place] for place in known], TOKENS[: len(steps)]) / steps).mean(axis=1)
    return np.where(np.abs(speeds - 1.0) <= LIKE, 1.0, speeds).tolist()
