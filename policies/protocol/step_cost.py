"""Seconds of an engine step on one replica, by the number of tokens that the model computes in it.

A value: built by the engine from its measured steps, read by drafting policies. Invariant: more tokens never
cost less time, and no step is free.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class StepCost:
    """Piecewise linear: a step of `tokens[j]` tokens takes `seconds[j]`.

    Below the first point a step takes as long as there; after the last it continues along the last piece. Raises
    ValueError unless there are at least two points, `tokens` grow and are positive, and `seconds` are positive and
    never fall.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    _x: np.ndarray = field(init=False, repr=False, compare=False)
    _y: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if len(self.tokens) < 2 or len(self.tokens) != len(self.seconds):
            raise ValueError(f"a step's cost needs two points or more: {len(self.tokens)}, {len(self.seconds)} given")
        if not (self.tokens[0] > 0 and all(a < b < float("inf") for a, b in pairwise(self.tokens))):
            raise ValueError(f"tokens of a step's cost must grow from above 0: {self.tokens}")
        if not (self.seconds[0] > 0 and all(a <= b < float("inf") for a, b in pairwise(self.seconds))):
            raise ValueError(f"seconds of a step's cost must be positive and never fall: {self.seconds}")
        object.__setattr__(self, "_x", np.array(self.tokens, np.float64))
        object.__setattr__(self, "_y", np.array(self.seconds, np.float64))

    def at(self, tokens) -> np.ndarray:
        """Returns the seconds of steps of this many tokens: float64, of the shape of `tokens`."""
        x, y = self._x, self._y
        tokens = np.asarray(tokens, np.float64)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.interp(tokens, x, y) + slope * np.maximum(tokens - x[-1], 0.0)

    def least_chance(self, running: int) -> float:
        """Returns the chance below which a draft token of one of `running` samples brings less than its time.

        Half of (tokens a second without drafts) * (min seconds of one more token, over the points within reach). k
        tokens of chance c pay if (n + k c) / t(n + k) > n / t(n). Half, because chances and costs are estimates.
        """
        ahead = (self._x > running) & (self._x <= 4 * running + 64)
        if not ahead.any():
            return 0.0
        now_s = float(self.at(running))
        slope = float(((self._y[ahead] - now_s) / (self._x[ahead] - running)).min())
        return 0.5 * running / now_s * max(0.0, slope)
