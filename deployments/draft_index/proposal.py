"""A draft as whoever makes it hands it on: the index of a group, or a drafter. Apart from both, as it loads nothing."""

from typing import NamedTuple

import numpy as np


class Proposal(NamedTuple):
    """Draft tokens of one path: tokens i32[n], right f32[n] (P(token j is right | those before are)), sources u8[n]
    (types.Source), and the tokens of context that the longest matching place shares."""

    tokens: np.ndarray
    right: np.ndarray
    sources: np.ndarray
    match_tokens: int
