"""The work of the two drivers of a soak: the same few batches again and again, under weights that take turns.

Invariant: batch `number` and its weights are functions of the number, so a driver that was killed comes back with the
same batch id, and each batch has a reference. Called by lab/soak/run.py and by the drivers' own processes.
"""

from collections.abc import Sequence

from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import Message, PromptGroup, RolloutBatch, SamplingParams

TRAINER, EVALUATOR = "trainer", "evaluator"

BATCHES_PER_VERSION = 2
"""Number of the trainer's batches for each version, so that each of its batches meets each folder of weights."""

TRAINED = {"samples": 4, "max_tokens": 96}
TAIL_TOKENS = 384
"""Maximum tokens of the last prompt of each of the trainer's batches: its samples are the tail."""

EVALUATED = {"samples": 2, "max_tokens": 40, "sampling": SamplingParams(temperature=0.6, top_p=0.95)}


class DriverScript(Message):
    """`folders`: weights that take turns, version by version. If there are none, the weights are left alone."""

    name: str
    role: Role
    app_name: str
    batches: tuple[RolloutBatch, ...]
    folders: tuple[str, ...] = ()

    def batch(self, number: int) -> RolloutBatch:
        """Returns batch `number`, counted from 0; the trainer's refuse any other weights than their own."""
        changes = {"batch_id": f"soak-{self.name}-{number}", "weights_version": self.version(number)}
        return self.batches[number % len(self.batches)].model_copy(update=changes)

    def version(self, number: int) -> int | None:
        """Returns the weights version of batch `number`: the references took the first ones, one for each folder."""
        return len(self.folders) + number // BATCHES_PER_VERSION if self.folders else None

    def folder(self, version: int) -> str:
        return self.folders[version % len(self.folders)]


def scripts_of(prompts: Sequence[PromptGroup], folders: Sequence[str], app_name: str) -> tuple[DriverScript, ...]:
    """Returns the scripts of the trainer and the evaluator, over 4 prompts or more."""
    long_tailed = [
        [one.model_copy(update=TRAINED | ({"max_tokens": TAIL_TOKENS} if one is four[-1] else {})) for one in four]
        for four in (prompts[:4], prompts[-4:])
    ]
    short = [[one.model_copy(update=EVALUATED) for one in prompts[first : first + 3]] for first in (0, 1)]
    return (
        DriverScript(
            name=TRAINER,
            role=Role.TRAINER,
            app_name=app_name,
            batches=_batches(TRAINER, long_tailed, 1),
            folders=tuple(folders),
        ),
        DriverScript(name=EVALUATOR, role=Role.EVALUATOR, app_name=app_name, batches=_batches(EVALUATOR, short, 2)),
    )


def _batches(name: str, groups: Sequence[Sequence[PromptGroup]], seed: int) -> tuple[RolloutBatch, ...]:
    return tuple(
        RolloutBatch(batch_id=f"{name}-{step}", groups=tuple(each), seed=seed, step=step)
        for step, each in enumerate(groups)
    )
