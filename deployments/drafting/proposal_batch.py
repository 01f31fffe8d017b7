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

    def copy(self) -> "ProposalBatch":
        """Returns a batch of the same proposals."""
        other = ProposalBatch(*self.tokens.shape)
        other.tokens[:], other.right[:], other.sources[:] = self.tokens, self.right, self.sources
        other.lengths[:], other.match_tokens[:] = self.lengths, self.match_tokens
        return other

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

    def cut(self, room: np.ndarray) -> None:
        """Limits each row to this many tokens, int[n]."""
        np.minimum(self.lengths, np.maximum(room, 0), out=self.lengths)
        self.right[np.arange(self.right.shape[1]) >= self.lengths[:, None]] = 0
