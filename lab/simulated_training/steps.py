"""The prompts of each training step: new ones until the data set is used up, then the same again, an epoch later.

Invariant: a prompt's history holds only earlier epochs, which have ended before it comes again (steps in flight are far
fewer than an epoch's). The order within a step is a digest's, or a replica would get the same prompts each epoch.
"""

from math import ceil

from tailrace.lab.simulator.laws import draw_steps
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.types import Workload
from tailrace.policies.models.hashed_random import fraction


def training_workload(scenario: Scenario, seed: int, steps: int, epoch_steps: int) -> Workload:
    """Returns `steps` steps of `scenario.prompts` prompts. Lengths drift from epoch to epoch, by the drift of all its
    steps.
    """
    prompts, slots = scenario.prompts.value, min(steps, epoch_steps)
    drift = scenario.lengths.drift.value * epoch_steps if scenario.lengths.drift else 0.0
    counts = prompts * slots, scenario.samples.value, ceil(steps / epoch_steps)
    epochs = draw_steps(scenario.law(), *counts, drift, seed, scenario.epochs.value, scenario.prompt_tokens.value)
    found = []
    for step in range(steps):
        slot = step % epoch_steps
        groups = epochs[step // epoch_steps][slot * prompts : (slot + 1) * prompts]
        found.append(tuple(sorted(groups, key=lambda group, step=step: fraction(seed, f"{step}/{group.group_id}"))))
    return Workload(scenario.name, scenario.max_tokens.value, tuple(found))
