"""The draft index of a group: the next tokens by the evidence of its prompt, its samples and their history.

Owns the tokens of one group (token_index.py) and, for each drafted sample, its aligned places.
Invariant: the index never raises on well-typed input and holds only tokens that were given to it.
Its proposals may be wrong, since drafts never change tokens.
Called by one thread of an engine (deployments/drafting/drafts.py). `HistoryIndex.build` is called by another thread
(deployments/drafting/group_indexes.py).
"""

from collections.abc import Sequence

import numpy as np

from tailrace.deployments.draft_index.alignment_state import AlignmentState
from tailrace.deployments.draft_index.draft_kernels import draft
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
"""Minimum aligned places at which phrases are looked up: with over 100 samples in a step their time would show."""

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


class _IndexedSample:
    """A sample in the index. `row`: its row of `AlignmentState`, or -1 if it is not drafted for.

    `followed`: known tokens at its latest draft. `noted`: those in the phrase table; its next draft adds the others.
    `lesson`: answer position at which a draft to learn from began, or -1 without one.
    """

    __slots__ = ("followed", "known", "last", "lesson", "noted", "row", "run")

    def __init__(self, last: int):
        self.known, self.last, self.run = 0, last, -1
        self.row, self.followed, self.lesson, self.noted = -1, 0, -1, 0


class GroupIndex:
    """The draft index of one group on one engine."""

    def __init__(self, evidence: CandidateScorer, prompt: np.ndarray):
        self._evidence = evidence
        self._arena = TokenIndex(len(prompt) + 512, 8)
        self._prompt_end = self._arena.append(
            -1, self._arena.start(PROMPT, WEIGHT_ONE), -len(prompt), np.array(prompt, np.int32)
        )
        self._past: TokenIndex | None = None
        self._samples: dict[int, _IndexedSample] = {}
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

    def known(self, sample_index: int) -> int:
        """Returns the number of known answer tokens of a sample: the end of the last `extend`."""
        sample = self._samples.get(sample_index)
        return sample.known if sample else 0

    def attach(self, history: HistoryIndex | None) -> None:
        """Sets the history to draft from, or None for no history."""
        self._past = history.arena if history is not None and self._evidence.settings.history else None
        self._followers.counts[:, 1] = 0

    def extend(self, sample_index: int, start: int, tokens: np.ndarray | list[int]) -> None:
        """Adds answer tokens [start, start + n) of a sample; known tokens are skipped, a gap starts a new run."""
        sample = self._sample(sample_index)
        if start < sample.known:
            tokens, start = tokens[sample.known - start :], sample.known
        if not len(tokens):
            return
        tokens = np.array(tokens, np.int32)  # a copy: numba compiles separately for read-only arrays
        if sample.lesson == start:
            self._evidence.learn(self._followers.lesson(sample.row), tokens)
            sample.lesson = -1
        gap = start > sample.known
        fresh = gap or sample.run < 0
        if fresh:
            sample.run = self._arena.start(sample_index, WEIGHT_ONE)
        last = -1 if gap else sample.last
        sample.last = self._arena.append(last, sample.run, start, tokens, fresh)
        sample.known = start + len(tokens)
        if sample.row < 0 or len(tokens) > REACH // 2:  # else its next draft does it
            self._evidence.note(tokens)
            sample.noted = sample.known

    def interrupt(self, sample_index: int) -> None:
        """The next tokens are not the sample's own: its last draft teaches nothing."""
        self._sample(sample_index).lesson = -1

    def ahead(self, sample_index: int, start: int, most: int) -> np.ndarray:
        """Returns known answer tokens [start, start + limit) of a sample, int32; none if they have a gap."""
        sample = self._samples.get(sample_index)
        count = sample.known - start if sample is not None and start >= 0 else 0
        if count <= 0:
            return _NO_TOKENS
        window = np.empty(count, np.int32)
        text, _, _, blocks, _ = self._arena.arrays
        found = context(text, blocks, sample.last, window)
        return window[::-1][:most] if found == count else _NO_TOKENS

    def candidates(self, sample_index: int) -> np.ndarray:
        """Returns the candidates of a sample's latest draft, as `TrainingExample.seen`."""
        return self._followers.lesson(self._sample(sample_index).row).seen

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
        most = min(most, MOST_TOKENS)
        if most < 1 or paths < 1:
            return [[] for _ in samples]
        wanted = list(zip(samples, sources or [self._sources] * len(samples), strict=True))
        found: list[list[Proposal]] = []
        for first in range(0, len(samples), TOGETHER):
            found += self._propose(wanted[first : first + TOGETHER], most, paths, least, share)
        return found

    def _propose(
        self, wanted: list[tuple[int, int]], most: int, paths: int, least: float, share: float
    ) -> list[list[Proposal]]:
        evidence, followers, count = self._evidence, self._followers, len(wanted)
        samples = [self._sample(index) for index, _ in wanted]
        for sample in samples:
            if sample.row < 0:
                sample.row = followers.add()
        rows = np.array(
            [
                (s.row, s.last, i, s.known - s.followed, of, s.known - s.noted, (self._drafts + n) % LESSONS == 0)
                for n, (s, (i, of)) in enumerate(zip(samples, wanted, strict=True), 1)
            ],
            np.int64,
        )
        rows[:, 4] &= self._sources
        rows[:, 5] *= evidence.settings.other_prompts
        found, scores, told, ahead = evidence.found, evidence.scores, evidence.told, evidence.ahead(most)
        live, past = self._arena.arrays, self._past
        places = max(1, round(share * TRACKS)), max(1, round(share * LOOKED_UP))
        if places[0] < PHRASED:
            rows[:, 4] &= ~bits(Source.OTHER)
        follow(
            live, live if past is None else past.arrays, past is not None, rows, places,
            followers.kept, followers.marks, followers.counts, evidence.recent, found, ahead, scores, told,
        )  # fmt: skip
        limit = max(5, min(CANDIDATES, 4 + places[0] // 8))
        shape = count, paths, most
        tokens, right, sources = np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
        ends, done = np.empty(shape[:2], np.int64), np.empty(count, np.int64)
        draft(
            rows, limit, told, evidence.recent, found, scores, ahead, *evidence.phrases, evidence.norm, evidence.net,
            np.float32(least), tokens, right, sources, ends, done, followers.features, followers.seen,
        )  # fmt: skip
        self._drafts += count
        proposals = []
        each = zip(samples, done.tolist(), ends.tolist(), told[:count, 1].tolist(), rows[:, 6].tolist(), strict=True)
        for s, (sample, many, lengths, match, teaches) in enumerate(each):
            sample.followed = sample.noted = sample.known
            if not many:
                proposals.append([])
                continue
            sample.lesson = sample.known if teaches else -1
            proposals.append(
                [
                    Proposal(tokens[s, p, :n], right[s, p, :n], sources[s, p, :n], match)
                    for p, n in enumerate(lengths[:many])
                ]
            )
        return proposals

    def _sample(self, index: int) -> _IndexedSample:
        sample = self._samples.get(index)
        if sample is None:
            sample = self._samples[index] = _IndexedSample(self._prompt_end)
        return sample


def warm_up() -> None:
    """Compiles (or loads from numba's cache) the kernels of a decode step, which would otherwise wait for them."""
    evidence, tokens = CandidateScorer(), np.arange(40, dtype=np.int32) % 7
    index = GroupIndex(evidence, tokens)
    index.attach(HistoryIndex.build([PastAnswer("", 0, 0, None, tokens)], 1, tokens, evidence.settings))
    for start in range(0, 4000, 40):
        index.propose(0, 4, 2)
        index.extend(0, start, tokens)
    index.ahead(0, 2, 2)
