"""What is kept of the samples of a group that are drafted for, a row each: the places they are followed along, and what
their latest draft was chosen from.

Arrays over all rows, so that one call of a kernel serves many samples; they grow by doubling. Owned by `GroupIndex`.
"""

from typing import NamedTuple

import numpy as np

from tailrace.deployments.draft_index.match_kernels import TRACKS
from tailrace.deployments.draft_index.scorer_kernels import CANDIDATES, FEATURES

NOTED_TOKENS = 8
"""Of a draft: those that are learned from."""


class TrainingExample(NamedTuple):
    """What the first path of a draft was chosen from, token by token: the candidates' features, f32[NOTED_TOKENS,
    CANDIDATES, FEATURES], and which they were, i32[NOTED_TOKENS, CANDIDATES + 1], how many there were last."""

    features: np.ndarray
    seen: np.ndarray


class AlignmentState:
    """kept i32[F, 2, TRACKS, 2], marks f32[F, 2, TRACKS, 2], counts i64[F, 2]: tracks through the group and through
    history. features, seen: of each row's `TrainingExample`."""

    def __init__(self):
        self.used = 0
        self.kept = np.zeros((1, 2, TRACKS, 2), np.int32)
        self.marks = np.zeros((1, 2, TRACKS, 2), np.float32)
        self.counts = np.zeros((1, 2), np.int64)
        self.features = np.zeros((1, NOTED_TOKENS, CANDIDATES, FEATURES), np.float32)
        self.seen = np.zeros((1, NOTED_TOKENS, CANDIDATES + 1), np.int32)

    def add(self) -> int:
        """A new row."""
        if self.used == len(self.counts):
            for name, array in vars(self).items():
                if name != "used":
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.used += 1
        return self.used - 1

    def lesson(self, row: int) -> TrainingExample:
        return TrainingExample(self.features[row], self.seen[row])
