"""Runs of tokens and the chains over them, in arrays that grow by doubling (layout: see match_kernels.py).

Used by group_index.py: one TokenIndex for a live group, one for its history.
"""

import numpy as np

from tailrace.deployments.draft_index.match_kernels import BEFORE, BLOCK, BLOCK_BITS, ORDERS, append, relink


class TokenIndex:
    """A growing store of tokens, with initial room for about `tokens` tokens in `runs` runs."""

    def __init__(self, tokens: int, runs: int = 16):
        self._allocate(tokens // BLOCK + runs + 2)
        self._runs = np.zeros((runs, 2), np.int32)
        self._used = np.zeros(1, np.int64)
        self._count = 0
        self.tokens = 0
        self.arrays = (self._text, self._chains, self._heads, self._blocks, self._runs)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)

    def start(self, owner: int, weight: int) -> int:
        """Starts a run; returns its number."""
        if self._count == len(self._runs):
            self._runs = np.concatenate([self._runs, np.zeros_like(self._runs)])
            self.arrays = (self._text, self._chains, self._heads, self._blocks, self._runs)
        self._runs[self._count] = owner, weight
        self._count += 1
        return self._count - 1

    def append(self, last: int, run: int, position: int, tokens: np.ndarray, fresh: bool = True) -> int:
        """Appends tokens to a run after the place `last` (-1: nothing before); returns the last place.

        The tokens are i32[n] and writable: numba compiles separately for read-only arrays.
        """
        if not len(tokens):
            return last
        places, runs, positions, ends = np.array([[last], [run], [position], [len(tokens)]], np.int64)
        return int(self.append_all(places, runs, positions, ends, tokens, fresh)[0])

    def append_all(
        self,
        last: np.ndarray,
        runs: np.ndarray,
        positions: np.ndarray,
        ends: np.ndarray,
        tokens: np.ndarray,
        fresh: bool = False,
    ) -> np.ndarray:
        """Appends to each of n runs its part of the tokens, which ends at ends[i]; returns the last places.

        last, runs, positions, ends i64[n]; see `append`.
        """
        need = int(self._used[0]) + len(tokens) // BLOCK + 2 * len(ends)
        if need > len(self._blocks):
            self._grow(max(need, len(self._blocks) * 3 // 2))
        self.tokens += len(tokens)
        places = np.array(last)
        append(*self.arrays[:4], self._used, places, fresh, np.array(runs), np.array(positions), ends, tokens)
        return places

    def before(self, place: int, tokens: int) -> int:
        """Returns the place that is this many tokens before another one; -1 before the first known token."""
        while tokens and place >= 0:
            inside = place & (BLOCK - 1)
            if tokens <= inside:
                return place - tokens
            place, tokens = int(self._blocks[place >> BLOCK_BITS, BEFORE]), tokens - inside - 1
        return place

    def _allocate(self, blocks: int) -> None:
        self._text = np.full(blocks << BLOCK_BITS, -1, np.int32)
        self._chains = np.full((blocks << BLOCK_BITS, len(ORDERS)), -1, np.int32)
        self._blocks = np.full((blocks, 4), -1, np.int32)
        self._heads = np.full(len(ORDERS) << (len(self._text) - 1).bit_length(), -1, np.int32)

    def _grow(self, blocks: int) -> None:
        text, table = self._text, self._blocks
        self._allocate(blocks)
        self._text[: len(text)] = text
        self._blocks[: len(table)] = table
        self.arrays = (self._text, self._chains, self._heads, self._blocks, self._runs)
        relink(*self.arrays[:4], self._used)
