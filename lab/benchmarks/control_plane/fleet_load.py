"""The load of `tailrace bench fleet`: lengths of answers, ages of the groups that run at the start, and prompts.

Invariant: all of the load is a function of ids, so that the coordinator's process and the engines' processes agree
without a message. Called by lab/benchmarks/control_plane/fleet_coordinator.py and fleet_engines.py.
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
"""Tokens per second of one sample: Qwen2.5-32B on 4 H800 with 32 samples a replica, see docs/measurements/scale.md."""

MEDIAN_TOKENS, SPREAD = 17_500, 0.6
"""Median in tokens, and standard deviation of the logarithm, of a lognormal distribution of lengths. Cut at MAX_TOKENS,
it has a mean of 20,000 tokens and a tail.
"""

GOLDEN = 0.6180339887498949
"""Golden ratio minus 1. The fractional parts of its multiples cover [0, 1) evenly from the first one on."""

_NORMAL = NormalDist()


def length_of(key: int, above: int = 0) -> int:
    """Returns the tokens of the answer with this sample key, drawn again until they are more than `above`."""
    for draw in count():
        drawn = _NORMAL.inv_cdf(min(max(fraction(draw, f"{key}"), 1e-9), 1 - 1e-9))
        if (length := int(min(max(MEDIAN_TOKENS * exp(SPREAD * drawn), 1), MAX_TOKENS))) > above:
            return length
    raise AssertionError("a count never ends")


class Age(NamedTuple):
    """Progress of a group when the benchmark begins. `tokens`: tokens that each of its samples has. `made`: whether
    engines make these tokens, at once, and answers keep them; else answers leave them out.
    """

    tokens: int
    made: bool

    def prompt(self) -> tuple[int, ...]:
        """Returns a prompt that begins with this age."""
        return (self.tokens, int(self.made), *range(2, PROMPT_TOKENS))

    @classmethod
    def of(cls, token_ids: np.ndarray) -> "Age":
        """Returns the age with which a context begins, see `prompt`."""
        return cls(int(token_ids[0]), bool(token_ids[1]))


def young(groups: int, batch: int) -> tuple[PromptGroup, ...]:
    """Returns groups that have not begun. `batch`: a number that no other call has."""
    prompt = Age(0, True).prompt()
    return tuple(_group(f"y{batch}-{n}", prompt, GROUP_SAMPLES) for n in range(groups))


def aged(samples: int, made: bool) -> tuple[tuple[PromptGroup, ...], int]:
    """Returns groups as in the middle of a long run, with at least `samples` samples that have not ended; and the
    number of these samples.

    Without `made`, the samples that have ended are left out too.
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
    """One chunk of an answer. `tokens`: tokens that it makes, of which the first `at_once` take no time. `stops`: it
    ends the answer. `early`: it ends before its limit, and the answer goes on.
    """

    tokens: int
    at_once: int
    stops: bool
    early: bool


def piece(key: int, age: Age, done: int, limit: int) -> LoadPiece:
    """Returns the next chunk, of at most `limit` tokens, of the answer with this sample key and `done` tokens."""
    length = length_of(key, 0 if age.made else age.tokens)
    if age.made:
        tokens = min(limit, length - done)
        return LoadPiece(tokens, min(max(age.tokens - done, 0), tokens), done + tokens == length, False)
    length, into = length - age.tokens, (age.tokens % CHUNK_TOKENS if done == 0 else 0)
    tokens = min(limit, CHUNK_TOKENS - into, length - done)
    return LoadPiece(tokens, 0, done + tokens == length, tokens < limit and done + tokens < length)
