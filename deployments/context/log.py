"""The tokens of one group in flight, in the order in which engines have told them.

Invariant: a position of a sample is written once, by whoever tells it first, so chunked, moved and raced samples are
one path, whatever the interleaving. An entry never changes; a cursor is a number of entries, and reading from it on
loses and repeats nothing. Kept in flat arrays: 4 bytes a token, 20 bytes an entry. Owned by `LiveGroups`.
"""

from array import array
from typing import NamedTuple

import numpy as np

COLUMNS = 4
"""Of an entry: writer, sample index, start, length."""


class Cursor(NamedTuple):
    """How far a reader has come: `entries` of the log that was born as `era`; another log is read from its start."""

    era: int
    entries: int


NOWHERE = Cursor(0, 0)


class Spans(NamedTuple):
    """Runs of tokens: row i is sample `rows[i, 0]` from position `rows[i, 1]`, `rows[i, 2]` tokens; all int32."""

    rows: np.ndarray
    tokens: np.ndarray


class GroupLog:
    """`era`: a positive number that no other log has ever had."""

    def __init__(self, era: int):
        self._era = era
        self._entries, self._tokens = array("i"), array("i")
        self._runs: dict[int, list[tuple[int, int]]] = {}  # by sample: what is known, [start, end), apart, ascending
        self.finished: dict[int, int] = {}  # by sample: length of its answer

    @property
    def nbytes(self) -> int:
        return 4 * (len(self._tokens) + len(self._entries)) + 200 * len(self._runs)

    def append(self, writer: int, sample_index: int, start: int, tokens: memoryview) -> None:
        """Positions [start, start + n) of a sample, int32; what is known is skipped, a gap before them is no error."""
        runs = self._runs.setdefault(sample_index, [])
        end = start + len(tokens)
        if runs and runs[-1][0] <= start <= runs[-1][1]:  # it goes on where the sample stands, as nearly always
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

    def fetch(self, cursor: Cursor, but_not_of: int) -> tuple[Spans, Cursor]:
        """What has come since `cursor`, except from one writer, a sample's pieces joined; and the cursor after it.

        A cursor of another log stands for its reader's first look: then everything, the reader's own too.
        """
        count = len(self._entries) // COLUMNS
        reads_on = cursor.era == self._era
        known = cursor.entries if reads_on else 0
        here = Cursor(self._era, count)
        if known >= count:
            return Spans(np.empty((0, 3), np.int32), np.empty(0, np.int32)), here
        entries = np.frombuffer(self._entries, np.int32).reshape(-1, COLUMNS)[known:]
        # Counted from the end, where readers are: a look costs what is new, not what there is.
        offsets = len(self._tokens) - np.cumsum(entries[::-1, 3], dtype=np.int64)[::-1]
        if reads_on:
            wanted = entries[:, 0] != but_not_of
            entries, offsets = entries[wanted], offsets[wanted]
        return _join(entries[:, 1:], offsets, np.frombuffer(self._tokens, np.int32)), here

    def finish(self, sample_index: int, length: int) -> None:
        self.finished[sample_index] = length

    def reach(self) -> dict[int, int]:
        """By sample: the position after the last token known."""
        return {sample: runs[-1][1] for sample, runs in self._runs.items() if runs}

    def _write(self, writer: int, sample_index: int, start: int, tokens: memoryview) -> None:
        self._entries.extend((writer, sample_index, start, len(tokens)))
        self._tokens.frombytes(tokens.cast("B"))


def _joined(runs: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The runs with [start, end) among them; those that touch become one."""
    apart = [run for run in runs if run[1] < start or run[0] > end]
    touched = [run for run in runs if run not in apart]
    whole = (min([start, *(run[0] for run in touched)]), max([end, *(run[1] for run in touched)]))
    return sorted([*apart, whole])


def _join(rows: np.ndarray, offsets: np.ndarray, tokens: np.ndarray) -> Spans:
    """The rows (sample, start, length), sorted, those of one sample that follow each other as one; copies."""
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    rows, offsets = rows[order], offsets[order]
    lengths, total = rows[:, 2], int(rows[:, 2].sum())
    ends = np.cumsum(lengths)
    picked = tokens[np.repeat(offsets - (ends - lengths), lengths) + np.arange(total)]
    follows = (rows[1:, 0] == rows[:-1, 0]) & (rows[1:, 1] == rows[:-1, 1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~follows)))[: len(rows)]
    joined = rows[first].copy()
    joined[:, 2] = np.add.reduceat(lengths, first) if len(rows) else lengths
    return Spans(joined, picked)
