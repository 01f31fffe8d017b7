"""The draft index of a group: the next tokens by the evidence of its prompt, its samples and their history.

Owns the tokens of one group (token_index.py) and, for each drafted sample, its aligned places.
Invariant: the index never raises on well-typed input and holds only tokens that were given to it.
Its proposals may be wrong, since drafts never change tokens.
Called by one thread of an engine (deployments/drafting/drafts.py). `HistoryIndex.build` is called by another thread
(deployments/drafting/group_indexes.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tailrace.deployments.draft_index.alignment_state import AlignmentState
from tailrace.deployments.draft_index.draft_kernels import draft
from tailrace.deployments.draft_index.indexed_samples import (
    FOLLOWED,
    INDEX,
    KNOWN,
    LAST,
    LESSON,
    NOTED,
    RUN,
    TRACKED,
    IndexedSamples,
)
from tailrace.deployments.draft_index.match_kernels import (
    LOOKED_UP,
    NOBODY,
    PAST,
    PROMPT,
    REACH,
    TRACKS,
    WEIGHT_ONE,
    context,
    follow,
)
from tailrace.deployments.draft_index.proposal import Proposal
from tailrace.deployments.draft_index.scorer import LESSONS, MOST_TOKENS, TOGETHER, CandidateScorer
from tailrace.deployments.draft_index.scorer_kernels import CANDIDATES
from tailrace.deployments.draft_index.settings import IndexSettings
from tailrace.deployments.draft_index.token_index import TokenIndex
from tailrace.deployments.messages.context import PastAnswer, Source, bits

PHRASED = 5
"""Minimum number of aligned places at which phrases are looked up: with over 100 samples in a step their time would
show.
"""

_NO_TOKENS = np.empty(0, np.int32)


class HistoryIndex:
    """Answers to one prompt in earlier epochs; built before a step, never changed."""

    def __init__(self, arena: TokenIndex):
        self.arena = arena

    @classmethod
    def build(
        cls, answers: list[PastAnswer], now_epoch: int, prompt: np.ndarray, settings: IndexSettings
    ) -> "HistoryIndex":
        """Indexes the answers, best evidence last; the loops run without the GIL."""
        arena = TokenIndex(sum(len(answer.tokens) for answer in answers) + len(prompt), 1 + len(answers))
        end = arena.append(-1, arena.start(NOBODY, 0), -len(prompt), np.array(prompt, np.int32))
        weighed = sorted(
            ((_weight(answer, now_epoch, settings), answer) for answer in answers), key=lambda pair: pair[0]
        )
        for weight, answer in weighed:
            arena.append(end, arena.start(PAST, weight), 0, np.array(answer.tokens, np.int32))
        return cls(arena)


def _weight(answer: PastAnswer, now_epoch: int, settings: IndexSettings) -> int:
    """Returns an answer's weight in 1/WEIGHT_ONE: 1 for the last epoch and an unknown reward, never 0."""
    age = max(0, now_epoch - answer.epoch - 1)
    reward = 0.5 if answer.reward is None else min(1.0, max(0.0, answer.reward))
    return max(1, round(WEIGHT_ONE * settings.epoch_decay**age * (1 + settings.reward_weight * (reward - 0.5))))


class DraftRows(NamedTuple):
    """Drafts of n samples, P paths each: tokens i32[n, P, K], right f32 and sources u8 of that shape.

    lengths i64[n, P]: 0 for an absent path. match_tokens i64[n]. See `Proposal`.
    """

    tokens: np.ndarray
    right: np.ndarray
    sources: np.ndarray
    lengths: np.ndarray
    match_tokens: np.ndarray


class GroupIndex:
    """The draft index of one group on one engine."""

    def __init__(self, evidence: CandidateScorer, prompt: np.ndarray):
        self._evidence = evidence
        self._arena = TokenIndex(len(prompt) + 512, 8)
        self._prompt_end = self._arena.append(
            -1, self._arena.start(PROMPT, WEIGHT_ONE), -len(prompt), np.array(prompt, np.int32)
        )
        self._past: TokenIndex | None = None
        self._samples = IndexedSamples(self._prompt_end)
        self._followers = AlignmentState()
        settings = evidence.settings
        self._sources = bits(*Source) & ~(0 if settings.group_context else bits(Source.MATE, Source.OTHER))
        self._sources &= ~(0 if settings.other_prompts else bits(Source.OTHER))
        self._drafts = 0

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of prompt and answers, without history."""
        return self._arena.tokens

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes, without history."""
        return self._arena.nbytes

    @property
    def whole_nbytes(self) -> int:
        """Returns the number of bytes, with history and the state of its drafted samples."""
        return self.nbytes + self._followers.nbytes + (0 if self._past is None else self._past.nbytes)

    def known(self, sample_index: int) -> int:
        """Returns the number of known answer tokens of a sample: the end of the last `extend`."""
        row = self._samples.get(sample_index)
        return 0 if row is None else int(self._samples.table[row, KNOWN])

    def known_all(self, samples: list[int]) -> np.ndarray:
        """Returns `known` of each sample, i64[n]."""
        return self._samples.table[self._samples.rows(samples), KNOWN]

    def attach(self, history: HistoryIndex | None) -> None:
        """Sets the history to draft from, or None for no history."""
        self._past = history.arena if history is not None and self._evidence.settings.history else None
        self._followers.counts[:, 1] = 0

    def extend(self, sample_index: int, start: int, tokens: np.ndarray | list[int]) -> None:
        """Adds answer tokens [start, start + n) of a sample; known tokens are skipped, a gap starts a new run."""
        row = self._samples.row(sample_index)
        sample = self._samples.table[row]
        _, known, last, run, tracked, _, _, lesson = sample.tolist()
        if start < known:
            tokens, start = tokens[known - start :], known
        if not len(tokens):
            return
        tokens = np.array(tokens, np.int32)  # a copy: numba compiles separately for read-only arrays
        if lesson == start:
            self._evidence.learn(self._followers.lesson(tracked), tokens)
            sample[LESSON] = -1
        gap = start > known
        fresh = gap or run < 0
        if fresh:
            sample[RUN] = run = self._arena.start(sample_index, WEIGHT_ONE)
        sample[LAST] = self._arena.append(-1 if gap else last, run, start, tokens, fresh)
        sample[KNOWN] = start + len(tokens)
        if tracked < 0 or len(tokens) > REACH // 2:  # else its next draft does it
            self._evidence.note(tokens)
            sample[NOTED] = sample[KNOWN]

    def extend_all(self, samples: list[int], starts: list[int], tokens: list[list[int]]) -> None:
        """Calls `extend` for each sample, with its own tokens; in one call of a kernel if all of them add a few tokens
        after their last.
        """
        rows, sizes = self._samples.rows(samples), np.array([len(some) for some in tokens], np.int64)
        table = self._samples.table
        now = table[rows]
        plain = (now[:, KNOWN] == starts) & (now[:, RUN] >= 0) & (now[:, TRACKED] >= 0) & (sizes <= REACH // 2)
        if len(set(samples)) < len(samples) or not plain.all():
            for piece in zip(samples, starts, tokens, strict=True):
                self._part(*piece)
                self.extend(*piece)
            return
        text = np.array([token for some in tokens for token in some], np.int32)
        ends = np.cumsum(sizes)
        taught = np.flatnonzero(now[:, LESSON] == now[:, KNOWN])
        if len(taught):
            parts = now[taught, TRACKED], text, ends[taught] - sizes[taught], ends[taught]
            self._evidence.learn_all(self._followers.features, self._followers.seen, *parts)
            table[rows[taught], LESSON] = -1
        table[rows, LAST] = self._arena.append_all(now[:, LAST], now[:, RUN], now[:, KNOWN], ends, text)
        table[rows, KNOWN] += sizes

    def _part(self, sample_index: int, start: int, tokens: list[int]) -> None:
        """Parts a sample from its known tokens from `start` on, unless `tokens`, its own, are among them: they are of
        an earlier run under the same names, or of a lost chunk whose tokens were drawn anew. Drafts would follow them.
        """
        known = self.ahead(sample_index, start, len(tokens))
        if known.tolist() == tokens[: len(known)]:
            return
        sample = self._samples.table[self._samples.row(sample_index)]
        sample[LAST] = self._arena.before(int(sample[LAST]), int(sample[KNOWN]) - start)
        sample[[KNOWN, RUN, FOLLOWED, LESSON]] = start, -1, 0, -1
        sample[NOTED] = min(sample[NOTED], start)

    def interrupt(self, sample_index: int) -> None:
        """Interrupts a sample: the next tokens are not its own, so its last draft teaches nothing."""
        row = self._samples.row(sample_index)
        self._samples.table[row, LESSON] = -1

    def ahead(self, sample_index: int, start: int, most: int) -> np.ndarray:
        """Returns known answer tokens [start, start + most) of a sample, int32; none if they have a gap."""
        row = self._samples.get(sample_index)
        count = self.known(sample_index) - start if row is not None and start >= 0 else 0
        if count <= 0:
            return _NO_TOKENS
        window = np.empty(count, np.int32)
        text, _, _, blocks, _ = self._arena.arrays
        found = context(text, blocks, int(self._samples.table[row, LAST]), window)
        return window[::-1][:most] if found == count else _NO_TOKENS

    def candidates(self, sample_index: int) -> np.ndarray:
        """Returns the candidates of a sample's latest draft, as `TrainingExample.seen`."""
        row = self._samples.row(sample_index)
        return self._followers.lesson(int(self._samples.table[row, TRACKED])).seen

    def propose(self, sample_index: int, most: int, paths: int = 1, least: float = 0.0) -> list[Proposal]:
        """Calls `propose_for` with one sample and all its evidence."""
        return self.propose_for([sample_index], most, paths, least)[0]

    def propose_for(
        self, samples: list[int], most: int, paths: int = 1, least: float = 0.0, share: float = 1.0,
        sources: Sequence[int] | None = None,
    ) -> list[list[Proposal]]:  # fmt: skip
        """Returns drafts that follow each sample's known tokens: at most `paths`, each of limited length, best first.

        A draft ends where the probability that all of it is right falls below the bound.
        `share`: fraction of the places that are aligned and looked up; a smaller one costs less time and little
        evidence. `sources`: the only sources to draft from (`bits`), by sample.
        """
        drafts = self.draft_rows(samples, most, paths, least, share, sources)
        found: list[list[Proposal]] = []
        for s, (lengths, match) in enumerate(zip(drafts.lengths.tolist(), drafts.match_tokens.tolist(), strict=True)):
            parts = [(s, p, slice(n)) for p, n in enumerate(lengths) if n]
            found.append([Proposal(*(array[part] for array in drafts[:3]), match) for part in parts])
        return found

    def draft_rows(
        self, samples: list[int], most: int, paths: int, least: float, share: float,
        sources: Sequence[int] | None = None,
    ) -> DraftRows:  # fmt: skip
        """Returns the drafts of `propose_for` in arrays."""
        count, most, paths = len(samples), max(0, min(most, MOST_TOKENS)), max(0, paths)
        shape = count, paths, most
        drafts = DraftRows(
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.uint8),
            lengths=np.zeros(shape[:2], np.int64),
            match_tokens=np.zeros(count, np.int64),
        )
        if most < 1 or paths < 1:
            return drafts
        wanted = np.full(count, self._sources) if sources is None else np.array(sources, np.int64) & self._sources
        rows = self._samples.rows(samples)
        for first in range(0, count, TOGETHER):
            some = slice(first, first + TOGETHER)
            self._draft(rows[some], wanted[some], least, share, DraftRows(*(array[some] for array in drafts)))
        return drafts

    def _draft(self, places: np.ndarray, wanted: np.ndarray, least: float, share: float, drafts: DraftRows) -> None:
        """Fills `drafts` for the samples in these rows of the table, from the `wanted` sources (bits)."""
        evidence, followers, table, (count, paths, most) = (
            self._evidence, self._followers, self._samples.table, drafts.tokens.shape
        )  # fmt: skip
        for place in places[table[places, TRACKED] < 0].tolist():
            if table[place, TRACKED] < 0:  # a sample may be asked for twice
                table[place, TRACKED] = followers.add()
        now = table[places]
        known = now[:, KNOWN]
        rows = np.empty((count, 7), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2] = now[:, TRACKED], now[:, LAST], now[:, INDEX]
        rows[:, 3], rows[:, 4] = known - now[:, FOLLOWED], wanted
        rows[:, 5] = (known - now[:, NOTED]) * evidence.settings.other_prompts
        rows[:, 6] = np.arange(self._drafts + 1, self._drafts + 1 + count) % LESSONS == 0
        found, scores, told, ahead = evidence.found, evidence.scores, evidence.told, evidence.ahead(most)
        live, past = self._arena.arrays, self._past
        limits = max(1, round(share * TRACKS)), max(1, round(share * LOOKED_UP))
        if limits[0] < PHRASED:
            rows[:, 4] &= ~bits(Source.OTHER)
        follow(
            live, live if past is None else past.arrays, past is not None, rows, limits,
            followers.kept, followers.marks, followers.counts, evidence.recent, found, ahead, scores, told,
        )  # fmt: skip
        limit = max(5, min(CANDIDATES, 4 + limits[0] // 8))
        ends, done = np.empty((count, paths), np.int64), np.empty(count, np.int64)
        draft(
            rows, limit, told, evidence.recent, found, scores, ahead, *evidence.phrases, evidence.norm, evidence.net,
            np.float32(least), *drafts[:3], ends, done, followers.features, followers.seen,
        )  # fmt: skip
        self._drafts += count
        drafts.lengths[:] = np.where(np.arange(paths) < done[:, None], ends, 0)
        drafts.match_tokens[:] = told[:count, 1]
        table[places, FOLLOWED] = table[places, NOTED] = known
        table[places, LESSON] = np.where(done > 0, np.where(rows[:, 6] > 0, known, -1), now[:, LESSON])


def warm_up() -> None:
    """Compiles (or loads from numba's cache) the kernels of a decode step, which would otherwise wait for them."""
    evidence, tokens = CandidateScorer(), np.arange(40, dtype=np.int32) % 7
    index = GroupIndex(evidence, tokens)
    index.attach(HistoryIndex.build([PastAnswer("", 0, 0, None, tokens)], 1, tokens, evidence.settings))
    for start in range(0, 4000, 40):
        index.propose(0, 4, 2)
        index.extend(0, start, tokens)
    for start in range(4000, 4000 + 2 * LESSONS):
        index.propose(0, 4)
        index.extend_all([0], [start], [[start % 7]])
    index.ahead(0, 2, 2)
