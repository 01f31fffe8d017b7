"""The tokens of one group in flight, in the order in which engines have sent them.

Invariant: a position of a sample is written once, by its first sender, so chunked, moved and raced samples give one
sequence, whatever the interleaving. An entry never changes. A cursor is a number of entries; reading on from it loses
and repeats nothing. Stored in flat arrays: 4 bytes a token, 20 bytes an entry. Owned by `LiveGroups`.
"""

from array import array
from typing import NamedTuple

import numpy as np

COLUMNS = 4
"""Number of columns of an entry: writer, sample index, start, length."""


class Cursor(NamedTuple):
    """Position of a reader: `entries` of the log with this `era`; another log is read from its start."""

    era: int
    entries: int


NOWHERE = Cursor(0, 0)


NOBODY = -1
"""Writer of entries that every reader gets."""

NO_ENTRIES, NO_TOKENS = np.empty((0, COLUMNS), np.int32), np.empty(0, np.int32)


class GroupLog:
    """`era`: a positive number, unique among all logs."""

    def __init__(self, era: int):
        self._era = era
        self._entries, self._tokens = array("i"), array("i")
        self._runs: dict[int, list[tuple[int, int]]] = {}  # by sample: known positions, [start, end), apart, ascending
        self.finished: dict[int, int] = {}  # by sample: length of its answer

    @property
    def nbytes(self) -> int:
        return 4 * (len(self._tokens) + len(self._entries)) + 200 * len(self._runs)

    def append(self, writer: int, sample_index: int, start: int, tokens: memoryview) -> None:
        """Writes positions [start, start + n) of a sample, int32; known ones are skipped, and a gap before them is no
        error.
        """
        runs = self._runs.setdefault(sample_index, [])
        end = start + len(tokens)
        if runs and runs[-1][0] <= start <= runs[-1][1]:  # it continues at the sample's end, the usual case
            first, known = runs[-1]
            if end > known:
                self._write(writer, sample_index, known, tokens[known - start :])
                runs[-1] = (first, end)
            return
        at = start
        for known_start, known_end in [*runs, (end, end)]:
            if at < min(known_start, end):
                self._write(writer, sample_index, at, tokens[at - start : min(known_start, end) - start])
            at = max(at, known_end)
        if end > start:
            self._runs[sample_index] = _joined(runs, start, end)

    def since(self, cursor: Cursor) -> tuple[np.ndarray, np.ndarray, Cursor]:
        """Returns the entries after `cursor`, int32[n, COLUMNS], their tokens in the same order, and the cursor after
        them.

        A cursor of another log means a reader's first call. It gets all entries, by NOBODY, so that a reader that
        leaves out its own entries gets them back. Returns copies; the cost grows with the new tokens only.
        """
        reads_on = cursor.era == self._era
        known = cursor.entries if reads_on else 0
        if known * COLUMNS == len(self._entries):
            return NO_ENTRIES, NO_TOKENS, Cursor(self._era, known)
        entries = np.frombuffer(self._entries[known * COLUMNS :], np.int32).reshape(-1, COLUMNS)
        if not reads_on:
            entries[:, 0] = NOBODY
        tokens = np.frombuffer(self._tokens[len(self._tokens) - int(entries[:, 3].sum()) :], np.int32)
        return entries, tokens, Cursor(self._era, known + len(entries))

    def finish(self, sample_index: int, length: int) -> None:
        self.finished[sample_index] = length

    def reach(self) -> dict[int, int]:
        """Returns the position after the last known token of each sample."""
        return {sample: runs[-1][1] for sample, runs in self._runs.items() if runs}

    def _write(self, writer: int, sample_index: int, start: int, tokens: memoryview) -> None:
        self._entries.extend((writer, sample_index, start, len(tokens)))
        self._tokens.frombytes(tokens.cast("B"))


def _joined(runs: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Adds [start, end) to the runs; runs that touch become one."""
    apart = [run for run in runs if run[1] < start or run[0] > end]
    touched = [run for run in runs if run not in apart]
    whole = (min([start, *(run[0] for run in touched)]), max([end, *(run[1] for run in touched)]))
    return sorted([*apart, whole])
