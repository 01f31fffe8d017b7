"""The questions of each step: a shuffle for each epoch, a function of the seed alone.

Invariant: a question occurs once an epoch, and a step's questions do not depend on the steps before it.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from tailrace.app.train.task import Question


class QuestionOrder:
    """`groups`: number of questions of a step. Steps count from 0."""

    def __init__(self, questions: Sequence[Question], groups: int, seed: int):
        self._questions, self._groups, self._seed = questions, groups, seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def of(self, step: int) -> tuple[Question, ...]:
        """Returns the questions of a step, by place."""
        count = len(self._questions)
        numbers = range(step * self._groups, (step + 1) * self._groups)
        return tuple(self._epoch(number // count)[number % count] for number in numbers)

    def _shuffled(self, epoch: int) -> list[Question]:
        def rank(question: Question) -> bytes:
            text = f"{self._seed}\0{epoch}\0{question.question_id}".encode()
            return blake2b(text, digest_size=8, person=b"tailrace-epoch").digest()

        return sorted(self._questions, key=rank)
