"""Messages between engines, context shards and the coordinator: tokens of answers, by group and sample.

Positions are those of the answer: 0 is the first generated token. Everything here is best effort: drafts never change
tokens, so a lost piece costs drafts and nothing else.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np


class Source(IntEnum):
    """Where the evidence for a draft token comes from."""

    OWN = 0  # the sample itself, its prompt included
    MATE = 1  # other samples of its group
    HISTORY = 2  # answers to the same prompt in earlier epochs
    MODEL = 3  # a draft model, see deployments.drafter
    OTHER = 4  # answers to other prompts
    VLLM = 5  # vLLM's own drafter: MTP, EAGLE, a draft model, n-grams


def bits(*sources: Source) -> int:
    """Returns a bit mask with one bit per source."""
    return sum(1 << source for source in sources)


class GroupRef(NamedTuple):
    """A group in flight. `prompt_key` names the prompt over epochs and runs; its history is stored under it."""

    group_id: str
    prompt_key: str


class Piece(NamedTuple):
    """Tokens [start, start + n) of one sample's answer; int32."""

    group: GroupRef
    sample_index: int
    start: int
    tokens: np.ndarray


class PastAnswer(NamedTuple):
    """A whole answer of an earlier epoch; int32. `reward` is None if none was recorded."""

    prompt_key: str
    epoch: int
    weights_version: int
    reward: float | None
    tokens: np.ndarray


class Fetched(NamedTuple):
    """News of a group: pieces of its samples, or its history, newest epochs first. The receiver owns the arrays."""

    group: GroupRef
    pieces: list[Piece]
    history: list[PastAnswer]
