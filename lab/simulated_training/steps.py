"""The prompts of each training step: new ones until the data set is used up, then the same again, an epoch later.

Invariant: a prompt's history holds only earlier epochs. They have ended before the prompt comes again, as steps in
flight are far fewer than those of an epoch. The order within a step is by a digest; otherwise a replica would get the
same prompts each epoch. With `by_length` the prompts of an epoch are divided as `tailrace train` divides them, by their
longest answer an epoch ago.
"""

from collections.abc import Sequence
from math import ceil

from tailrace.app.calls.length_order import batch_rank, by_like_length
from tailrace.lab.simulator.laws import draw_steps
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.types import Workload, WorkloadGroup
from tailrace.policies.models.hashed_random import fraction


def training_workload(scenario: Scenario, seed: int, steps: int, epoch_steps: int, by_length: bool = False) -> Workload:
    """Returns `steps` steps of `scenario.prompts` prompts. Lengths drift from epoch to epoch, by the drift of all steps
    of an epoch.
    """
    prompts, slots = scenario.prompts.value, min(steps, epoch_steps)
    drift = scenario.lengths.drift.value * epoch_steps if scenario.lengths.drift else 0.0
    counts = prompts * slots, scenario.samples.value, ceil(steps / epoch_steps)
    epochs = draw_steps(scenario.law(), *counts, drift, seed, scenario.epochs.value, scenario.prompt_tokens.value)
    if by_length:
        epochs = [_by_length(groups, prompts, seed, epoch) for epoch, groups in enumerate(epochs)]
    found = []
    for step in range(steps):
        slot = step % epoch_steps
        groups = epochs[step // epoch_steps][slot * prompts : (slot + 1) * prompts]
        found.append(tuple(sorted(groups, key=lambda group, step=step: fraction(seed, f"{step}/{group.group_id}"))))
    return Workload(scenario.name, scenario.max_tokens.value, tuple(found))


def _by_length(groups: Sequence[WorkloadGroup], prompts: int, seed: int, epoch: int) -> list[WorkloadGroup]:
    """Returns an epoch's groups, so that those of each step had answers of like length an epoch ago; unchanged without
    history.
    """
    longest = {group.group_id: max(group.past_lengths[0]) for group in groups if group.past_lengths}
    sizes = [prompts] * (len(groups) // prompts)
    return by_like_length(
        groups, longest, sizes, lambda part: batch_rank(seed, epoch, part), lambda group: group.group_id
    )
