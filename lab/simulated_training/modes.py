"""Modes of training: the order of rollout and training steps, by name, with their policies and their GPUs.

All modes have the same number of GPUs. With `apart` a share of them trains and the others roll out; otherwise all GPUs
do both by turns. Invariant: a mode is a value; its meaning in time is in `host` and `learner` alone.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches

from tailrace.lab.simulator.systems import STATIC, SYSTEMS, System

HISTO_PIPE = System(
    "prompts bound to replicas by HistoPipe, drafts by goodput",
    STATIC | {"ordering": "histo_pipe", "drafting": "goodput"},
    admission=False,
)
MIGRATING = replace(HISTO_PIPE, policies=HISTO_PIPE.policies | {"ordering": {"type": "histo_pipe", "migrate": True}})


@dataclass(frozen=True, slots=True)
class TrainingMode:
    """`ahead`: maximum number of steps by which the rollout is ahead of training. `streams`: gradients begin before the
    step has ended, in a fixed order. `rounds`: rollout and training begin together and wait for each other.
    `in_flight`: samples continue through updates. `own_update`: each replica loads weights by itself, between two of
    its steps. `late`: rewards begin once the rollout has ended. `old_logprobs`: the trainer computes old logprobs
    again. `by_length`: the prompts of a step had answers of like length an epoch ago. `puts_off`: outliers that move to
    the next step are trained on there. `by_groups`: groups are admitted one by one and trained on as they end, within
    `ahead` updates.
    """

    about: str
    system: System
    apart: bool
    ahead: int = 0
    streams: bool = False
    rounds: bool = False
    in_flight: bool = False
    own_update: bool = False
    late: bool = False
    old_logprobs: bool = False
    by_length: bool = False
    puts_off: bool = False
    by_groups: bool = False


TAILRACE, VERL = SYSTEMS["tailrace"], SYSTEMS["verl"]
FINISH = replace(TAILRACE, policies=TAILRACE.policies | {"kv_on_update": "finish"})
MODES = {
    "verl": TrainingMode(
        "verl's shape: static groups, no drafts, training waits; all GPUs by turns", VERL, False,
        late=True, old_logprobs=True,
    ),
    "verl_no_old_pass": TrainingMode(
        "the same, with the rollout's own logprobs as the old ones: verl's bypass mode", VERL, False, late=True
    ),
    "verl_apart": TrainingMode(
        "as verl; training has GPUs of its own", VERL, True, late=True, old_logprobs=True
    ),
    "verl_by_length": TrainingMode(
        "as verl, with the prompts of each step of like length an epoch ago", VERL, False,
        late=True, old_logprobs=True, by_length=True,
    ),
    "sync": TrainingMode("rollout, rewards, training and weights in turn; all GPUs by turns", TAILRACE, False),
    "sync_by_length": TrainingMode(
        "as sync, with the prompts of each step of like length an epoch ago", TAILRACE, False, by_length=True
    ),
    "overlap": TrainingMode("on-policy: gradients begin group by group in a fixed order", TAILRACE, True, streams=True),
    "one_step_off": TrainingMode(
        "the next step is rolled out while this one trains", TAILRACE, True, ahead=1, rounds=True
    ),
    "bounded": TrainingMode(
        "samples continue through updates; admission by capacity", TAILRACE, True,
        ahead=2, streams=True, in_flight=True,
    ),
    "bounded_groups": TrainingMode(
        "as bounded; groups are admitted one by one, and a step is trained on those that end", TAILRACE, True,
        ahead=2, streams=True, in_flight=True, by_groups=True,
    ),
    "finish": TrainingMode(
        "as one_step_off without its wait: samples end under their weights, each replica updates once it has none",
        FINISH, True, ahead=1, streams=True,
    ),
    "histopipe": TrainingMode(
        "RhymeRL's: replicas update by themselves between steps, ranking groups take turns", HISTO_PIPE, True,
        ahead=1, own_update=True,
    ),
    "histopipe_migrating": TrainingMode(
        "as histopipe; outliers move within their step or to the next (RhymeRL 6.3)", MIGRATING, True,
        ahead=1, own_update=True, puts_off=True,
    ),
}  # fmt: skip
BASELINE = "verl"


def mode(name: str, max_staleness: int = 2) -> TrainingMode:
    """Looks up a mode. Raises ValueError that suggests the closest name. `max_staleness`: value of `ahead` for modes
    whose samples continue through updates.
    """
    if name not in MODES:
        near = get_close_matches(name, MODES, n=1, cutoff=0.4)
        hint = f"nearest: {near[0]}; " if near else ""
        raise ValueError(f"no mode is called {name!r}; {hint}known: {', '.join(MODES)}")
    found = MODES[name]
    return replace(found, ahead=max_staleness) if found.in_flight else found
