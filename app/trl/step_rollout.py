"""One call for samples by a trainer: prompts in, samples out, in the trainer's order.

Invariant: tokens are a function of the seed, the trainer's step, the prompt's place in the step and the sample's index,
under the weights that were sent last. Made by `tailrace.attach`.
"""

import itertools
import os
from pathlib import Path
from uuid import uuid4

from tailrace.app.calls.client import RolloutClient
from tailrace.app.errors import Failed
from tailrace.app.trl.sampling import sampling_of
from tailrace.app.trl.turns import Turn, Turns
from tailrace.app.trl.weights_sender import WeightsSender
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult
from tailrace.policies.protocol.actions import SampleEnd

EVALUATION_STEPS = 1 << 40
"""Added to the step of evaluation samples, so that they share no key with training."""


class StepRollout:
    """The samples of one trainer.

    `seed`: part of every sample key. `weights_dir`: a folder for the trainer's weights that all nodes of the service
    see; None: they go through memory.
    """

    def __init__(self, trainer, client: RolloutClient, *, weights_dir: Path | str | None = None, seed: int = 0):
        self._trainer, self._client, self._seed = trainer, client, seed
        self._weights = WeightsSender(trainer, client, weights_dir)
        self._sampling = sampling_of(trainer.args)
        self._turns: dict[int, Turns] = {}  # of the present step alone

    @property
    def weights_version(self) -> int | None:
        """Version of the weights that were sent last, under which all samples of the step are made; None before."""
        return self._weights.version

    def send_weights(self) -> None:
        """Sends the trainer's present weights to the service; each process calls it. Raises as `WeightsSender.send`."""
        self._weights.send()

    def samples(self, prompts: list[list[int]], samples: int) -> list[list[SampleResult]]:
        """Generates `samples` samples of each prompt (token ids). Raises Failed if the service gives up a sample."""
        step = self._step()
        turns_of_step = self._turns_of(step)
        turns = turns_of_step.call(prompts, samples)
        groups = tuple(map(self._group, turns, prompts, itertools.repeat(samples)))
        batch = RolloutBatch(
            batch_id=f"trl-{step}-{turns_of_step.calls}-{os.getpid()}-{uuid4().hex[:6]}",
            groups=groups,
            step=step,
            seed=self._seed,
            weights_version=self._weights.version,
        )
        found = {}
        for group in self._client.rollout_blocking(batch):
            check_answered(group)
            found[group.prompt_id] = list(group.samples)
        for turn, prompt in zip(turns, prompts, strict=True):
            for sample in found[turn.prompt_id]:
                turns_of_step.ended(turn, sample.sample_index, [*prompt, *sample.token_ids])
        return [found[turn.prompt_id] for turn in turns]

    def _step(self) -> int:
        step = self._trainer.state.global_step
        return step if self._trainer.model.training else step + EVALUATION_STEPS

    def _turns_of(self, step: int) -> Turns:
        if step not in self._turns:
            self._turns = {step: Turns()}
        return self._turns[step]

    def _group(self, turn: Turn, prompt: list[int], samples: int) -> PromptGroup:
        """Returns the group of a turn. A later turn has the tokens that the sample's earlier turns have left."""
        left = self._trainer.max_completion_length - (len(prompt) - turn.first_tokens)
        return PromptGroup(
            prompt_id=turn.prompt_id,
            token_ids=tuple(prompt),
            samples=samples,
            max_tokens=max(1, left),
            sampling=self._sampling,
        )


def check_answered(group: GroupResult) -> None:
    """Raises Failed if the service gave up a sample."""
    if (sample := given_up(group)) is not None:
        reason = sample.error or sample.finish_reason
        raise Failed(f"prompt {group.prompt_id} sample {sample.sample_index} has no answer: {reason}")


def given_up(group: GroupResult) -> SampleResult | None:
    """Returns the first sample of a group that the service gave up, or None if all have an answer."""
    answered = (SampleEnd.STOP, SampleEnd.LENGTH)
    return next((sample for sample in group.samples if sample.finish_reason not in answered), None)
