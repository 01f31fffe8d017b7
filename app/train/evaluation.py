"""Accuracy on held-out questions: one greedy answer to each, under the weights that the service has."""

import math
from collections.abc import Sequence

from tailrace.app.client import RolloutClient
from tailrace.app.train.record.accuracy import Accuracy
from tailrace.app.train.rewards import RewardPool
from tailrace.app.train.task import Question
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch, SamplingParams


def accuracy(
    client: RolloutClient,
    pool: RewardPool,
    questions: Sequence[Question],
    prompts: Sequence[Sequence[int]],
    step: int,
    max_tokens: int,
) -> Accuracy:
    """`prompts`: token ids of the questions."""
    greedy = {"samples": 1, "max_tokens": max_tokens, "sampling": SamplingParams(temperature=0.0)}
    groups = tuple(
        PromptGroup(prompt_id=question.question_id, token_ids=tuple(prompt), **greedy)
        for question, prompt in zip(questions, prompts, strict=True)
    )
    by_id = {question.question_id: question for question in questions}
    futures = [
        pool.submit(by_id[group.prompt_id], group.samples[0].text)
        for group in client.rollout_blocking(RolloutBatch(batch_id=f"held-out-{step}", groups=groups, step=step))
    ]
    values = [future.result().value or 0.0 for future in futures]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return Accuracy(step=step, mean=mean, standard_error=math.sqrt(variance / len(values)), questions=len(values))
