"""The draft index of a group: what its prompt, its samples and their history say comes next.

Owns the tokens of one group as an arena of places (kernels.py). Invariant: the index never raises on well-typed input
and never knows a token that was not handed to it; what it proposes may be wrong, since drafts never change tokens.
Called by one thread of an engine (deployments/engine/drafts.py); `HistoryIndex.build` by the feed's.
"""

from typing import NamedTuple

import numpy as np

from deployments.context.evidence import Evidence, IndexSettings
from deployments.context.kernels import BLOCK, BLOCK_BITS, COLUMNS, PROMPT, append, context, propose, relink
from deployments.context.types import PastAnswer

_NO_TOKENS = np.empty(0, np.int32)


class Proposal(NamedTuple):
    """Draft tokens of one path: tokens i32[n], right f32[n] (P(token j is right | those before are)), sources u8[n]
    (types.Source), and the tokens of context that the longest matching place shares."""

    tokens: np.ndarray
    right: np.ndarray
    sources: np.ndarray
    match_tokens: int


class Arena:
    """Token runs and the chains over them; grows by doubling."""

    def __init__(self, tokens: int = 512):
        blocks = max(2, tokens // BLOCK)
        self.rows = np.full((blocks << BLOCK_BITS, COLUMNS), -1, np.int32)
        self.heads = np.full(_heads(len(self.rows)), -1, np.int32)
        self.blocks = np.full((blocks, 3), -1, np.int32)
        self.owners = np.full(16, -1, np.int32)
        self.used = np.zeros(1, np.int64)
        self.runs = 0
        self.tokens = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.rows.nbytes + self.heads.nbytes + self.blocks.nbytes + self.owners.nbytes

    def start(self, owner: int) -> int:
        """A new run's number; `owner` is the sample it belongs to."""
        if self.runs == len(self.owners):
            self.owners = np.concatenate([self.owners, np.full_like(self.owners, -1)])
        self.owners[self.runs] = owner
        self.runs += 1
        return self.runs - 1

    def append(self, last: int, fresh: bool, run: int, tokens: np.ndarray) -> int:
        """Append tokens to a run after the place `last`; returns the last place."""
        need = int(self.used[0]) + len(tokens) // BLOCK + 2
        if need > len(self.blocks):
            self._grow(max(need, 2 * len(self.blocks)))
        self.tokens += len(tokens)
        return append(self.rows, self.heads, self.blocks, self.used, last, fresh, run, tokens)

    def _grow(self, blocks: int) -> None:
        rows, table = self.rows, self.blocks
        self.rows = np.full((blocks << BLOCK_BITS, COLUMNS), -1, np.int32)
        self.rows[: len(rows)] = rows
        self.blocks = np.full((blocks, 3), -1, np.int32)
        self.blocks[: len(table)] = table
        self.heads = np.full(_heads(len(self.rows)), -1, np.int32)
        relink(self.rows, self.heads, self.blocks, self.used)


class HistoryIndex:
    """Answers to one prompt in earlier epochs; built before the step, never changed."""

    def __init__(self, arena: Arena):
        self.arena = arena

    @classmethod
    def build(
        cls, answers: list[PastAnswer], now_epoch: int, prompt: np.ndarray, settings: IndexSettings
    ) -> "HistoryIndex":
        """Index the answers; the loops run without the GIL."""
        arena = Arena(sum(len(answer.tokens) + BLOCK for answer in answers) + len(prompt) + BLOCK)
        end = _add_prompt(arena, prompt)
        for answer in answers if settings.history else []:
            tokens = np.ascontiguousarray(answer.tokens, np.int32)
            if len(tokens):
                arena.append(end, True, arena.start(0), tokens)
        return cls(arena)


class GroupIndex:
    """The draft index of one group on one engine."""

    def __init__(self, evidence: Evidence, prompt: np.ndarray):
        self._evidence = evidence
        self._arena = Arena(len(prompt) + 512)
        self._prompt_end = _add_prompt(self._arena, prompt)
        self._past = _EMPTY
        self._last: dict[int, int] = {}
        self._run: dict[int, int] = {}
        self._known: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        """Tokens held: prompt and answers, history not counted."""
        return self._arena.tokens

    @property
    def nbytes(self) -> int:
        """Bytes held, history not counted."""
        return self._arena.nbytes

    def known(self, sample_index: int) -> int:
        """Answer tokens known of a sample: the end of what `extend` was given."""
        return self._known.get(sample_index, 0)

    def attach(self, history: HistoryIndex | None) -> None:
        """Draft from this history from now on; None: from none."""
        self._past = _EMPTY if history is None or not self._evidence.settings.history else history.arena

    def extend(self, sample_index: int, start: int, tokens: np.ndarray) -> None:
        """Take answer tokens [start, start + n) of a sample; known ones are skipped, a gap starts a new run."""
        known = self._known.get(sample_index, 0)
        tokens = np.ascontiguousarray(tokens, np.int32)[max(0, known - start) :]
        if not len(tokens):
            return
        last, fresh = self._last.get(sample_index, self._prompt_end), False
        if start > known:
            last, fresh = -1, True
        elif sample_index not in self._run:
            fresh = True
        if fresh:
            self._run[sample_index] = self._arena.start(sample_index)
        self._last[sample_index] = self._arena.append(last, fresh, self._run[sample_index], tokens)
        self._known[sample_index] = max(start, known) + len(tokens)

    def ahead(self, sample_index: int, start: int, most: int) -> np.ndarray:
        """Answer tokens [start, start + most) of a sample that are known, int32; none where they are known with a gap."""
        count = self._known.get(sample_index, 0) - start
        if count <= 0 or start < 0:
            return _NO_TOKENS
        window = np.empty(count, np.int32)
        arena = self._arena
        found = context(arena.rows, arena.blocks, self._last[sample_index], window)
        return window[::-1][:most] if found == count else _NO_TOKENS

    def propose(self, sample_index: int, most: int, paths: int = 1) -> list[Proposal]:
        """At most `paths` drafts of at most `most` tokens for what follows the known tokens, best first."""
        if most < 1 or paths < 1:
            return []
        arena, past = self._arena, self._past
        tokens, right = np.empty((paths, most), np.int32), np.empty((paths, most), np.float32)
        sources = np.empty((paths, most), np.uint8)
        last = self._last.get(sample_index, self._prompt_end)
        done, lengths, match = propose(
            arena.rows, arena.heads, arena.blocks, arena.owners, past.rows, past.heads, past.blocks,
            last, sample_index, self._evidence.table, most, tokens, right, sources,
        )  # fmt: skip
        ends = lengths.tolist()
        return [Proposal(tokens[i, :n], right[i, :n], sources[i, :n], match) for i, n in enumerate(ends[:done])]


def warm_up() -> None:
    """Compile (or load from numba's cache) all that a decode step would otherwise wait for."""
    index = GroupIndex(Evidence(), np.arange(4, dtype=np.int32))
    index.attach(HistoryIndex.build([PastAnswer("", 0, 0, None, np.arange(9, dtype=np.int32))], 1, _NO_TOKENS, _PLAIN))
    index.extend(0, 0, np.arange(4, dtype=np.int32))
    index.propose(0, 4, 2)
    index.ahead(0, 2, 2)
    index.extend(1, 0, np.arange(2000, dtype=np.int32))


def _add_prompt(arena: Arena, prompt: np.ndarray) -> int:
    """The prompt's last place; -1 where the prompt is empty."""
    prompt = np.ascontiguousarray(prompt, np.int32)
    return arena.append(-1, True, arena.start(PROMPT), prompt) if len(prompt) else -1


def _heads(rows: int) -> int:
    return 1 << (2 * rows - 1).bit_length()


_PLAIN = IndexSettings()
_EMPTY = Arena(0)
