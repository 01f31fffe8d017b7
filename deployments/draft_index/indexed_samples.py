"""The samples of a group's index in one table, a row each, so that one call of a kernel serves many.

Invariant: a sample keeps its row. Owned by `GroupIndex`; the table grows by doubling.
"""

from collections.abc import Sequence

import numpy as np

INDEX, KNOWN, LAST, RUN, TRACKED, FOLLOWED, NOTED, LESSON = range(8)
"""Columns. KNOWN: its answer tokens in the index. LAST: their last place. RUN: run of its latest tokens, or -1.

TRACKED: its row of `AlignmentState`, or -1 if it is not drafted for. FOLLOWED: known tokens at its latest draft. NOTED:
those in the phrase table; its next draft adds the others. LESSON: answer position at which a draft to learn from began,
or -1 without one.
"""


class IndexedSamples:
    """The rows by sample index. `last`: the place before an answer's first token."""

    def __init__(self, last: int):
        self._new = np.array([0, 0, last, -1, -1, 0, 0, -1], np.int64)
        self._rows: dict[int, int] = {}
        self.table = np.empty((4, len(self._new)), np.int64)

    def get(self, index: int) -> int | None:
        """Returns the row of a sample, or None if nothing is known of it."""
        return self._rows.get(index)

    def row(self, index: int) -> int:
        """Returns the row of a sample, a new one for a new sample."""
        row = self._rows.get(index)
        if row is None:
            row = self._rows[index] = len(self._rows)
            if row == len(self.table):
                self.table = np.concatenate([self.table, np.empty_like(self.table)])
            self.table[row] = self._new
            self.table[row, INDEX] = index
        return row

    def rows(self, indexes: Sequence[int]) -> np.ndarray:
        """Returns the rows of these samples, i64[n]."""
        return np.array([self.row(index) for index in indexes], np.int64)
