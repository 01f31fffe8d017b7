"""The questions of each step: a shuffle for each epoch, or batches of like length, as functions of the seed.

Invariant: a question occurs once an epoch. By `shuffle` a step's questions do not depend on the steps before it; by
`by_length` an epoch depends on the lengths that were known when its first samples could begin, and on nothing later.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise

from tailrace.app.calls.length_order import batch_rank, by_like_length
from tailrace.app.train.task import Question

Longest = Callable[[int], Mapping[str, int]]
"""Returns the tokens of each question's longest sample, by its id, in the first so many steps."""


class QuestionOrderName(StrEnum):
    SHUFFLE = "shuffle"
    BY_LENGTH = "by_length"


class QuestionOrder:
    """`groups`: number of questions of a step. Steps count from 0.

    `longest`: for batches of like length; None: a shuffle. `ahead`: steps whose samples are started before their turn:
    an epoch is ordered by steps that had ended when its first one could start.
    """

    def __init__(
        self, questions: Sequence[Question], groups: int, seed: int, longest: Longest | None = None, ahead: int = 0
    ):
        self._questions, self._groups, self._seed = questions, groups, seed
        self._longest, self._ahead = longest, ahead
        self._epoch = lru_cache(maxsize=2)(self._ordered)

    def of(self, step: int) -> tuple[Question, ...]:
        """Returns the questions of a step, by place."""
        count = len(self._questions)
        numbers = range(step * self._groups, (step + 1) * self._groups)
        return tuple(self._epoch(number // count)[number % count] for number in numbers)

    def _ordered(self, epoch: int) -> list[Question]:
        shuffled = self._shuffled(epoch)
        if self._longest is None:
            return shuffled
        first = epoch * len(shuffled)
        longest = self._longest(max(0, first // self._groups - self._ahead))
        sizes = self._parts(first, first + len(shuffled))

        def rank(part: int) -> bytes:
            """A part of a step comes first: with its other epoch's part it is a step of short questions."""
            return b"" if sizes[part] < self._groups else batch_rank(self._seed, epoch, part)

        return by_like_length(shuffled, longest, sizes, rank, lambda question: question.question_id)

    def _parts(self, first: int, end: int) -> list[int]:
        """Returns the numbers of questions that the steps have of those from `first` to `end`."""
        cuts = [first, *range((first // self._groups + 1) * self._groups, end, self._groups), end]
        return [after - before for before, after in pairwise(cuts)]

    def _shuffled(self, epoch: int) -> list[Question]:
        def rank(question: Question) -> bytes:
            text = f"{self._seed}\0{epoch}\0{question.question_id}".encode()
            return blake2b(text, digest_size=8, person=b"tailrace-epoch").digest()

        return sorted(self._questions, key=rank)
