"""The load of `tailrace bench fleet`: lengths of answers, ages of the groups that run at the start, and prompts.

Invariant: all of it is a function of ids, so that the coordinator's process and the engines' processes agree without a
word. Called by lab/benchmarks/control_plane/fleet_coordinator.py and fleet_engines.py.
"""

from itertools import count
from math import exp
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.policies.models.hashed_random import fraction

GROUP_SAMPLES = 16
PROMPT_TOKENS = 500
MAX_TOKENS = 40_000
CHUNK_TOKENS = 8_192
TOKENS_PER_S = 50.0
"""Of one sample: Qwen2.5-32B on 4 H800 with 32 samples a replica, see docs/measurements/scale.md."""

MEDIAN_TOKENS, SPREAD = 17_500, 0.6
"""Of a lognormal, cut at MAX_TOKENS: 20,000 tokens on the average, with a tail."""

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, cover [0, 1) evenly from the first one on."""

_NORMAL = NormalDist()


def length_of(key: int, above: int = 0) -> int:
    """Tokens of the answer with this sample key, drawn again until they are more than `above`."""
    for draw in count():
        drawn = _NORMAL.inv_cdf(min(max(fraction(draw, f"{key}"), 1e-9), 1 - 1e-9))
        if (length := int(min(max(MEDIAN_TOKENS * exp(SPREAD * drawn), 1), MAX_TOKENS))) > above:
            return length
    raise AssertionError("a count never ends")


class Age(NamedTuple):
    """How far a group has come when the benchmark begins. `tokens`: of each of its samples. `made`: they are made at
    once and kept; else they are left out of the answers."""

    tokens: int
    made: bool

    def prompt(self) -> tuple[int, ...]:
        """A prompt that names it."""
        return (self.tokens, int(self.made), *range(2, PROMPT_TOKENS))

    @classmethod
    def of(cls, token_ids: np.ndarray) -> "Age":
        """Of a context that begins with such a prompt."""
        return cls(int(token_ids[0]), bool(token_ids[1]))


def young(groups: int, batch: int) -> tuple[PromptGroup, ...]:
    """Groups that have not begun. `batch`: a number that no other call has."""
    prompt = Age(0, True).prompt()
    return tuple(_group(f"y{batch}-{n}", prompt, GROUP_SAMPLES) for n in range(groups))


def aged(samples: int, made: bool) -> tuple[tuple[PromptGroup, ...], int]:
    """Groups as found in the middle of a long run, with `samples` unended samples in all; and their true number.

    Without the tokens made so far, the samples that have ended are left out too.
    """
    groups, unended = [], 0
    for number in count(1):
        tokens = int(MAX_TOKENS * (number * GOLDEN % 1.0))
        name = f"a{number}"
        left = sum(length_of(sample_key(0, 0, name, index)) > tokens for index in range(GROUP_SAMPLES))
        if left:
            groups.append(_group(name, Age(tokens, made).prompt(), GROUP_SAMPLES if made else left))
            unended += left
        if unended >= samples:
            return tuple(groups), unended
    raise AssertionError("a count never ends")


def _group(name: str, prompt: tuple[int, ...], samples: int) -> PromptGroup:
    return PromptGroup(prompt_id=name, token_ids=prompt, samples=samples, max_tokens=MAX_TOKENS)


class LoadPiece(NamedTuple):
    """One chunk of an answer: the tokens that it makes, of which the first `at_once` take no time, and whether it ends
    the answer, or ends early."""

    tokens: int
    at_once: int
    stops: bool
    early: bool


def piece(key: int, age: Age, done: int, limit: int) -> LoadPiece:
    """The next chunk, of at most `limit` tokens, of the answer with this sample key, which has `done` tokens."""
    length = length_of(key, 0 if age.made else age.tokens)
    if age.made:
        tokens = min(limit, length - done)
        return LoadPiece(tokens, min(max(age.tokens - done, 0), tokens), done + tokens == length, False)
    length, into = length - age.tokens, (age.tokens % CHUNK_TOKENS if done == 0 else 0)
    tokens = min(limit, CHUNK_TOKENS - into, length - done)
    return LoadPiece(tokens, 0, done + tokens == length, tokens < limit and done + tokens < length)
