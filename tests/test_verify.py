"""The certificate finds every kind of difference, and names sample and position."""

import pytest

from app.certificates.tokens import TOLERANCE, compare, corrupt
from deployments.messages import GroupResult, SampleResult
from policies.actions import SampleEnd


def rollout(**changes) -> list[GroupResult]:
    samples = [
        SampleResult(
            sample_index=i, token_ids=(10, 11, 12, 13), text="", logprobs=(-1.0, -2.0, -3.0, -4.0),
            raw_logprobs=(-1.5, -2.5, -3.5, -4.5), finish_reason=SampleEnd.STOP,
        )
        for i in range(2)
    ]  # fmt: skip
    samples[1] = samples[1].model_copy(update=changes)
    return [GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=(1,), samples=tuple(samples))]


def test_the_same_is_the_same_in_any_order():
    groups = rollout()
    other = [groups[0].model_copy(update={"samples": groups[0].samples[::-1]})]
    result = compare(groups, other)
    assert result["identical"] and result["first_difference"] is None
    assert result["max_logprob_difference"] == result["mean_logprob_difference"] == 0.0


@pytest.mark.parametrize(
    "changes, position, what",
    [
        ({"token_ids": (10, 11, 99, 13)}, 2, "token"),
        ({"token_ids": (10, 11, 12)}, 3, "end"),
        ({"finish_reason": SampleEnd.LENGTH}, 4, "end"),
        ({"logprobs": (-1.0, -2.0 - 2 * TOLERANCE, -3.0, -4.0)}, 1, "logprobs"),
        ({"raw_logprobs": (-1.5, -2.5, -3.5, float("nan"))}, 3, "raw_logprobs"),
    ],
)
def test_a_difference_is_named_by_sample_and_position(changes, position, what):
    result = compare(rollout(), rollout(**changes))
    assert not result["identical"]
    first = result["first_difference"]
    assert (first["prompt_id"], first["sample_index"], first["position"], first["what"]) == ("p", 1, position, what)


def test_noise_below_the_tolerance_is_reported_but_no_difference():
    result = compare(rollout(), rollout(logprobs=(-1.0, -2.00005, -3.0, -4.0)))
    assert result["identical"]
    assert result["max_logprob_difference"] == pytest.approx(5e-5)
    assert 0 < result["mean_logprob_difference"] < 5e-5


def test_a_missing_sample_is_a_difference():
    groups = rollout()
    fewer = [groups[0].model_copy(update={"samples": groups[0].samples[:1]})]
    assert compare(groups, fewer)["first_difference"]["what"] == "missing"


def test_the_deliberate_corruption_is_found():
    groups = rollout()
    first = compare(groups, corrupt(groups))["first_difference"]
    assert (first["sample_index"], first["position"], first["what"]) == (1, 2, "token")
