"""The proposals of one step, a row for each sample, in arrays.

Invariant: right is 0 after a proposal's end. Made by `EngineDrafts` after a step, on the engine's thread.
"""

import numpy as np

from tailrace.deployments.draft_index.group_index import DraftRows
from tailrace.deployments.draft_index.proposal import Proposal


class ProposalBatch:
    """tokens i32[n, K], right f32[n, K], sources u8[n, K]; lengths and match_tokens i32[n]."""

    def __init__(self, count: int, most: int):
        self.tokens, self.right = np.zeros((count, most), np.int32), np.zeros((count, most), np.float32)
        self.sources = np.zeros((count, most), np.uint8)
        self.lengths, self.match_tokens = np.zeros((2, count), np.int32)

    def put(self, row: int, proposal: Proposal) -> None:
        """Sets the proposal of one row."""
        size = len(proposal.tokens)
        self.tokens[row, :size], self.right[row, :size] = proposal.tokens, proposal.right
        self.right[row, size:] = 0
        self.sources[row, :size] = proposal.sources
        self.lengths[row], self.match_tokens[row] = size, proposal.match_tokens

    def get(self, row: int) -> Proposal:
        """Returns the proposal of one row."""
        size, match = int(self.lengths[row]), int(self.match_tokens[row])
        return Proposal(self.tokens[row, :size], self.right[row, :size], self.sources[row, :size], match)

    def fill(self, rows: list[int], drafts: DraftRows) -> None:
        """Sets the proposals of these rows: the first paths of the drafts."""
        size = drafts.tokens.shape[2]
        self.tokens[rows, :size], self.right[rows, :size] = drafts.tokens[:, 0], drafts.right[:, 0]
        self.sources[rows, :size] = drafts.sources[:, 0]
        self.lengths[rows], self.match_tokens[rows] = drafts.lengths[:, 0], drafts.match_tokens

    def join(self, rows: np.ndarray, tokens: np.ndarray, right: np.ndarray, source: int) -> None:
        """Joins other proposals with those of some rows i64[m], as `Proposal.joined` does; common tokens keep theirs.

        tokens i32[m, k], right f32[m, k], 0 after a proposal's end; all of one source.
        """
        most = self.tokens.shape[1]
        size = min(most, tokens.shape[1])
        other, theirs = (np.zeros((len(rows), most), each.dtype) for each in (self.tokens, self.right))
        other[:, :size], theirs[:, :size] = tokens[:, :size], right[:, :size]
        ours, column = self.right[rows], np.arange(most)
        common = np.logical_and.accumulate((other == self.tokens[rows]) & (ours > 0) & (theirs > 0), axis=1)
        after = [np.where(common, 0, np.cumprod(np.where(common, 1, each), axis=1)) for each in (ours, theirs)]
        better = (after[1].sum(axis=1) > after[0].sum(axis=1))[:, None] & ~common
        self.tokens[rows] = np.where(better, other, self.tokens[rows])
        self.sources[rows] = np.where(better, source, self.sources[rows])
        self.right[rows] = np.where(common, np.maximum(ours, theirs), np.where(better, theirs, ours))
        self.lengths[rows] = np.where(better, (theirs > 0) * (column + 1), (ours > 0) * (column + 1)).max(axis=1)

    def cut(self, room: np.ndarray) -> None:
        """Limits each row to this many tokens, int[n]."""
        np.minimum(self.lengths, np.maximum(room, 0), out=self.lengths)
        self.right[np.arange(self.right.shape[1]) >= self.lengths[:, None]] = 0
