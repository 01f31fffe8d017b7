"""Prompts in batches of like length, by the lengths of their last answers: for drivers and for `tailrace train`.

A step ends with its longest sample, so steps with one long prompt among short ones wait for it; here few steps have all
long ones. Invariant: every prompt comes once, with its whole group; the order is a function of the arguments alone.
Pure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

from tailrace.deployments.messages.rollout import GroupResult, PromptGroup

T = TypeVar("T")


class LengthOrder:
    """`groups`: prompts of a batch. `seed`: of the order of batches. `longest`: tokens of the longest answer to each
    prompt that is known, by its name; `record` adds others.
    """

    def __init__(self, groups: int, seed: int = 0, longest: Mapping[str, float] | None = None):
        self._groups, self._seed = groups, seed
        self._longest = dict(longest or {})
        self._epoch = 0

    def record(self, group: GroupResult) -> None:
        """Records the longest answer of a group, under its prompt_id."""
        self._longest[group.prompt_id] = max(len(sample.token_ids) for sample in group.samples)

    def batches(self, prompts: Sequence[PromptGroup]) -> Iterator[tuple[PromptGroup, ...]]:
        """Yields the prompts of one epoch in batches, each prompt once; the last batch may be smaller.

        `prompts`: in the order that they would have; it stays the order within each batch. The lengths are those that
        are known as the first batch is taken, which begins the next epoch. Without any the order stays.
        """
        epoch, self._epoch = self._epoch, self._epoch + 1
        sizes = [min(self._groups, len(prompts) - first) for first in range(0, len(prompts), self._groups)]

        def rank(part: int) -> bytes:
            return batch_rank(self._seed, epoch, part)

        order = iter(by_like_length(prompts, self._longest, sizes, rank, lambda prompt: prompt.prompt_id))
        for size in sizes:
            yield tuple(islice(order, size))


def batch_rank(seed: int, epoch: int, part: int) -> bytes:
    """Returns a batch's rank in its epoch, a digest: batches sorted by length would be a curriculum."""
    return blake2b(f"{seed}\0{epoch}\0{part}".encode(), digest_size=8, person=b"tailrace-length").digest()


def by_like_length(
    prompts: Sequence[T],
    longest: Mapping[str, float],
    sizes: Sequence[int],
    rank: Callable[[int], bytes],
    name: Callable[[T], str],
) -> list[T]:
    """Returns the same prompts so that consecutive parts of these sizes have prompts of like length.

    Prompts are sorted by `longest` and cut into one run for each part, in the order of the parts' ranks; within a part
    they keep their order. Prompts whose length is not known count as average; if none is known the order stays. Raises
    ValueError if the sizes do not add up to the number of prompts.
    """
    if sum(sizes) != len(prompts):
        raise ValueError(f"sizes of {sum(sizes)} prompts in all, and {len(prompts)} prompts")
    known = [longest[name(prompt)] for prompt in prompts if name(prompt) in longest]
    if not known:
        return list(prompts)
    average = sum(known) / len(known)
    ranked = iter(sorted(range(len(prompts)), key=lambda place: (longest.get(name(prompts[place]), average), place)))
    parts: list[list[int]] = [[] for _ in sizes]
    for part in sorted(range(len(sizes)), key=rank):
        parts[part] = sorted(next(ranked) for _ in range(sizes[part]))
    return [prompts[place] for part in parts for place in part]
