"""A group of an asynchronous trainer that has ended: its samples with advantages, as TRL's own worker queues them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ScoredGroup:
    """`samples`: TRL's `RolloutSample`s by sample index, whose `model_version` is that of the oldest trained token.

    `newest`: the trainer's version of each sample's newest token. `metrics`: for the trainer's log; a pair is summed
    over groups, and then divided.
    """

    number: int
    samples: list
    newest: list[int]
    metrics: dict[str, float | tuple[float, float]]


MakeGroup = Callable[[int, dict, Callable[[int], int]], Awaitable[ScoredGroup]]
"""Makes a group of its number and its row of the data set, by a function that returns the trainer's version for one of
the service's. Raises Failed, with the reason in one line.
"""


def samples_of_a_step(args) -> int:
    """Returns the number of samples of an optimizer step, in all processes."""
    return args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps


def step_of(args, number: int) -> int:
    """Returns the step in the sample keys of a group: that of the optimizer, if no sample has branches."""
    return number * args.num_generations // samples_of_a_step(args)


def as_message(role: str, text: str) -> list[dict[str, str]]:
    """Returns a conversation of one message."""
    return [{"role": role, "content": text}]
