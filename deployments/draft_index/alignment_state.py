"""State of a group's drafted samples, a row each: their aligned places, and the candidates of their latest draft.

Arrays over all rows, so that one call of a kernel serves many samples; they grow by doubling. Owned by `GroupIndex`.
"""

from typing import NamedTuple

import numpy as np

from tailrace.deployments.draft_index.match_kernels import TRACKS
from tailrace.deployments.draft_index.scorer_kernels import CANDIDATES, FEATURES

NOTED_TOKENS = 8
"""Tokens of a draft that are learned from."""


class TrainingExample(NamedTuple):
    """The candidates of a draft's first path, token by token.

    features f32[NOTED_TOKENS, CANDIDATES, FEATURES]. seen i32[NOTED_TOKENS, CANDIDATES + 1]: the candidates' token ids,
    then their count in the last column.
    """

    features: np.ndarray
    seen: np.ndarray


class AlignmentState:
    """Tracks through the group and through history, with F rows.

    kept i32[F, 2, TRACKS, 2], marks f32[F, 2, TRACKS, 2], counts i64[F, 2].
    features, seen: the arrays of each row's `TrainingExample`.
    """

    def __init__(self):
        self.used = 0
        self.kept = np.zeros((1, 2, TRACKS, 2), np.int32)
        self.marks = np.zeros((1, 2, TRACKS, 2), np.float32)
        self.counts = np.zeros((1, 2), np.int64)
        self.features = np.zeros((1, NOTED_TOKENS, CANDIDATES, FEATURES), np.float32)
        self.seen = np.zeros((1, NOTED_TOKENS, CANDIDATES + 1), np.int32)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the arrays."""
        return sum(array.nbytes for array in (self.kept, self.marks, self.counts, self.features, self.seen))

    def add(self) -> int:
        """Returns a new row."""
        if self.used == len(self.counts):
            for name, array in vars(self).items():
                if name != "used":
                    setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self.used += 1
        return self.used - 1

    def lesson(self, row: int) -> TrainingExample:
        return TrainingExample(self.features[row], self.seen[row])
