"""The draft type of group indexes and drafters. Separate from both, because it imports neither."""

from typing import NamedTuple

import numpy as np


class Proposal(NamedTuple):
    """Draft tokens of one path: tokens i32[n], right f32[n] (P(token j is right | those before are)), sources u8[n].

    `sources` are of messages.context.Source. `match_tokens`: context tokens that the longest matching place shares.
    """

    tokens: np.ndarray
    right: np.ndarray
    sources: np.ndarray
    match_tokens: int
