"""Accuracy on held-out questions, under the service's present weights."""

import math
from collections.abc import Sequence

from tailrace.app.calls.client import RolloutClient
from tailrace.app.train.record.accuracy import Accuracy, Mean
from tailrace.app.train.rewards import RewardPool
from tailrace.app.train.task import Question
from tailrace.app.trl.step_rollout import check_answered
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SamplingParams

HELD_OUT_STEPS = 1 << 41
"""Added to the step in sample keys, so that held-out samples share none with training."""


class HeldOut:
    """`prompts`: token ids of the questions. `samples`: number of answers to each, drawn by `sampling`, besides a
    greedy one.
    """

    def __init__(
        self,
        client: RolloutClient,
        pool: RewardPool,
        questions: Sequence[Question],
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_tokens: int,
        sampling: SamplingParams,
    ):
        self._client, self._pool = client, pool
        self._questions = {question.question_id: question for question in questions}
        self._prompts = dict(zip(self._questions, prompts, strict=True))
        self._samples, self._max_tokens, self._sampling = samples, max_tokens, sampling

    def accuracy(self, step: int) -> Accuracy:
        """Returns the accuracy. Failed rewards count as 0. Raises Failed if the service gives up a sample."""
        return Accuracy(
            step=step,
            questions=len(self._questions),
            samples=self._samples,
            greedy=self._mean(step, 1, SamplingParams(temperature=0.0)),
            sampled=self._mean(step, self._samples, self._sampling) if self._samples else None,
        )

    def _mean(self, step: int, samples: int, sampling: SamplingParams) -> Mean:
        groups = tuple(
            PromptGroup(
                prompt_id=name,
                token_ids=tuple(prompt),
                samples=samples,
                max_tokens=self._max_tokens,
                sampling=sampling,
            )
            for name, prompt in self._prompts.items()
        )
        batch = RolloutBatch(
            batch_id=f"held-out-{step}-{samples}-{sampling.temperature:g}", groups=groups, step=HELD_OUT_STEPS + step
        )
        begun = []
        for group in self._client.rollout_blocking(batch):
            check_answered(group)
            question = self._questions[group.prompt_id]
            begun.append([self._pool.submit(question, sample.text) for sample in group.samples])
        rewards = [[future.result().value or 0.0 for future in futures] for futures in begun]
        return mean_of([math.fsum(values) / len(values) for values in rewards])


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and standard error over questions."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return Mean(value=mean, standard_error=math.sqrt(variance / len(values)))
