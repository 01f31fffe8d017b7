"""The draft index of a group: what its prompt, its samples and their history say comes next.

Owns the tokens of one group (arena.py) and, for each sample drafted for, the places that it is followed along.
Invariant: the index never raises on well-typed input and never knows a token that was not handed to it; what it
proposes may be wrong, since drafts never change tokens. Called by one thread of an engine (deployments/engine/
drafts.py); `HistoryIndex.build` by the feed's.
"""

from typing import NamedTuple

import numpy as np

from deployments.context.arena import Arena
from deployments.context.choice import draft
from deployments.context.evidence import LESSONS, MOST_TOKENS, Evidence, Lesson
from deployments.context.kernels import NOBODY, PAST, PROMPT, TRACKS, WEIGHT_ONE, context, follow
from deployments.context.settings import IndexSettings
from deployments.context.types import PastAnswer

_NO_TOKENS = np.empty(0, np.int32)


class Proposal(NamedTuple):
    """Draft tokens of one path: tokens i32[n], right f32[n] (P(token j is right | those before are)), sources u8[n]
    (types.Source), and the tokens of context that the longest matching place shares."""

    tokens: np.ndarray
    right: np.ndarray
    sources: np.ndarray
    match_tokens: int


class HistoryIndex:
    """Answers to one prompt in earlier epochs; built before the step, never changed."""

    def __init__(self, arena: Arena):
        self.arena = arena

    @classmethod
    def build(
        cls, answers: list[PastAnswer], now_epoch: int, prompt: np.ndarray, settings: IndexSettings
    ) -> "HistoryIndex":
        """Index the answers, best evidence last; the loops run without the GIL."""
        arena = Arena(sum(len(answer.tokens) for answer in answers) + len(prompt), 1 + len(answers))
        end = arena.append(-1, arena.start(NOBODY, 0), -len(prompt), prompt)
        weighed = sorted(
            ((_weight(answer, now_epoch, settings), answer) for answer in answers), key=lambda pair: pair[0]
        )
        for weight, answer in weighed:
            arena.append(end, arena.start(PAST, weight), 0, answer.tokens)
        return cls(arena)


def _weight(answer: PastAnswer, now_epoch: int, settings: IndexSettings) -> int:
    """An answer's weight in 1/WEIGHT_ONE: 1 for the last epoch and an unknown reward, never 0."""
    age = max(0, now_epoch - answer.epoch - 1)
    reward = 0.5 if answer.reward is None else min(1.0, max(0.0, answer.reward))
    return max(1, round(WEIGHT_ONE * settings.epoch_decay**age * (1 + settings.reward_weight * (reward - 0.5))))


class Follower:
    """A sample that is drafted for: its tracks through the group and through history, and its latest draft's lesson."""

    __slots__ = ("known", "lesson", "tracks")

    def __init__(self):
        self.lesson, self.known = Lesson(), 0
        self.tracks = [[np.zeros((TRACKS, 2), np.int32), np.zeros((TRACKS, 2), np.float32), 0] for _ in range(2)]


class _Sample:
    __slots__ = ("follower", "known", "last", "run")

    def __init__(self, last: int):
        self.known, self.last, self.run, self.follower = 0, last, -1, None


class GroupIndex:
    """The draft index of one group on one engine."""

    def __init__(self, evidence: Evidence, prompt: np.ndarray):
        self._evidence = evidence
        self._arena = Arena(len(prompt) + 512, 8)
        self._prompt_end = self._arena.append(-1, self._arena.start(PROMPT, WEIGHT_ONE), -len(prompt), prompt)
        self._past: Arena | None = None
        self._samples: dict[int, _Sample] = {}
        self._mates = evidence.settings.group_context
        self._drafts = 0

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
        sample = self._samples.get(sample_index)
        return sample.known if sample else 0

    def attach(self, history: HistoryIndex | None) -> None:
        """Draft from this history from now on; None: from none."""
        self._past = history.arena if history is not None and self._evidence.settings.history else None
        for sample in self._samples.values():
            if sample.follower is not None:
                sample.follower.tracks[1][2] = 0

    def extend(self, sample_index: int, start: int, tokens: np.ndarray) -> None:
        """Take answer tokens [start, start + n) of a sample; known ones are skipped, a gap starts a new run."""
        sample = self._samples.get(sample_index)
        if sample is None:
            sample = self._samples[sample_index] = _Sample(self._prompt_end)
        tokens = np.array(
            tokens[max(0, sample.known - start) :], np.int32
        )  # its own: numba compiles for read-only ones apart
        start = max(start, sample.known)
        if not len(tokens):
            return
        follower = sample.follower
        if follower is not None and follower.lesson.position == start:
            self._evidence.learn(follower.lesson, tokens)
            follower.lesson.position = -1
        gap = start > sample.known
        fresh = gap or sample.run < 0
        if fresh:
            sample.run = self._arena.start(sample_index, WEIGHT_ONE)
        last = -1 if gap else sample.last
        sample.last = self._arena.append(last, sample.run, start, tokens, fresh)
        sample.known = start + len(tokens)

    def ahead(self, sample_index: int, start: int, most: int) -> np.ndarray:
        """Answer tokens [start, start + most) of a sample that are known, int32; none where they have a gap."""
        sample = self._samples.get(sample_index)
        count = sample.known - start if sample is not None and start >= 0 else 0
        if count <= 0:
            return _NO_TOKENS
        window = np.empty(count, np.int32)
        rows, _, blocks, _ = self._arena.arrays
        found = context(rows, blocks, sample.last, window)
        return window[::-1][:most] if found == count else _NO_TOKENS

    def propose(self, sample_index: int, most: int, paths: int = 1, least: float = 0.0) -> list[Proposal]:
        """At most `paths` drafts of at most `most` tokens for what follows the known tokens, best first.

        Each ends where the chance that all of it is right falls below `least`.
        """
        most = min(most, MOST_TOKENS)
        if most < 1 or paths < 1:
            return []
        sample = self._samples.get(sample_index)
        if sample is None:
            sample = self._samples[sample_index] = _Sample(self._prompt_end)
        if sample.follower is None:
            sample.follower = Follower()
        follower, evidence = sample.follower, self._evidence
        fresh, follower.known = sample.known - follower.known, sample.known
        rows = match = 0
        for arena, tracks in zip((self._arena, self._past), follower.tracks, strict=True):
            if arena is not None:
                rows, tracks[2], longest = follow(
                    arena.arrays, self._arena.arrays, sample.last, sample_index, fresh, self._mates, most,
                    tracks[0], tracks[1], tracks[2], evidence.found, evidence.ahead, evidence.scores, rows,
                )  # fmt: skip
                match = max(match, longest)
        if not rows:
            return []
        tokens, right = np.empty((paths, most), np.int32), np.empty((paths, most), np.float32)
        sources = np.empty((paths, most), np.uint8)
        lesson = follower.lesson
        done, lengths = draft(
            rows, evidence.found, evidence.scores, evidence.ahead, evidence.norm, evidence.net, np.float32(least),
            tokens, right, sources, lesson.features, lesson.seen,
        )  # fmt: skip
        self._drafts += 1
        lesson.position = sample.known if self._drafts % LESSONS == 0 else -1
        ends = lengths.tolist()
        return [Proposal(tokens[i, :n], right[i, :n], sources[i, :n], match) for i, n in enumerate(ends[:done])]


def warm_up() -> None:
    """Compile (or load from numba's cache) all that a decode step would otherwise wait for."""
    evidence, tokens = Evidence(), np.arange(40, dtype=np.int32) % 7
    index = GroupIndex(evidence, tokens)
    index.attach(HistoryIndex.build([PastAnswer("", 0, 0, None, tokens)], 1, tokens, evidence.settings))
    for start in range(0, 4000, 40):
        index.propose(0, 4, 2)
        index.extend(0, start, tokens)
    index.ahead(0, 2, 2)
