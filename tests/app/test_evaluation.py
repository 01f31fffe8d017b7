"""Accuracy on held-out questions."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tailrace.app.errors import Failed
from tailrace.app.train.evaluation import HeldOut
from tailrace.app.train.record.accuracy import Accuracy, Mean
from tailrace.app.train.rewards import Reward
from tailrace.app.train.task import Question
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, SampleResult, SamplingParams


def held_out(end: str = "stop") -> HeldOut:
    """Two questions, of which all answers to the first are right. `end`: of the last sample of each group."""

    def rolled(batch: RolloutBatch):
        for group in batch.groups:
            ends = ["length"] * (group.samples - 1) + [end]
            samples = [
                SampleResult(sample_index=n, token_ids=(), text="", logprobs=(), raw_logprobs=(), finish_reason=end)
                for n, end in enumerate(ends)
            ]
            yield GroupResult(batch_id="b", prompt_id=group.prompt_id, prompt_token_ids=(1,), samples=samples)

    def submit(question: Question, completion: str) -> Future:
        future = Future()
        future.set_result(Reward(1.0, "ok") if question.question_id == "q0" else Reward(None, "failed"))
        return future

    return HeldOut(
        SimpleNamespace(rollout_blocking=rolled),
        SimpleNamespace(submit=submit),
        [Question(f"q{number}", "text", None) for number in range(2)],
        [(1,), (1,)],
        samples=3,
        max_tokens=8,
        sampling=SamplingParams(),
    )


def test_accuracy_is_the_mean_over_questions_and_a_failed_reward_counts_as_0():
    half = Mean(value=0.5, standard_error=0.5)
    assert held_out().accuracy(4) == Accuracy(step=4, questions=2, samples=3, greedy=half, sampled=half)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_sample_that_the_service_gave_up_is_no_wrong_answer(end):
    with pytest.raises(Failed, match=f"prompt q0 sample 0 has no answer: {end}"):
        held_out(end).accuracy(4)
