"""Requests as trainers write them: honoured, or refused in one line that names a substitute."""

import pytest
from pydantic import ValidationError

from tailrace.deployments.messages.refusals import REFUSED
from tailrace.deployments.messages.rollout import MAX_SAMPLES, PromptGroup, RolloutBatch, SamplingParams

GROUP = {"prompt_id": "p", "token_ids": (1, 2)}
BATCH = {"batch_id": "b", "groups": (GROUP,)}
REQUESTS = [(SamplingParams, {}), (PromptGroup, GROUP), (RolloutBatch, BATCH)]
MUST_REFUSE = {
    "stop", "n", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens",
    "ignore_eos", "bad_words", "structured_outputs",
}  # fmt: skip


@pytest.mark.parametrize(("given", "kept"), [(-1, 0), (0, 0), (40, 40)])
def test_top_k_is_off_at_0_and_at_minus_1(given, kept):
    assert SamplingParams(top_k=given).top_k == kept


def test_another_negative_top_k_is_refused():
    with pytest.raises(ValidationError, match="top_k"):
        SamplingParams(top_k=-2)


def test_integer_ids_become_text():
    batch = RolloutBatch(batch_id=3, groups=({"prompt_id": 7, "token_ids": (1,)},))
    assert batch.batch_id == "3" and batch.groups[0].prompt_id == "7"


def test_an_integer_and_its_text_are_one_id():
    with pytest.raises(ValidationError, match="prompt_id '7' is given twice"):
        RolloutBatch(batch_id=3, groups=(GROUP | {"prompt_id": 7}, GROUP | {"prompt_id": "7"}))


@pytest.mark.parametrize("wrong", ["", None, True, 1.5])
def test_other_ids_are_refused(wrong):
    with pytest.raises(ValidationError, match="prompt_id"):
        PromptGroup(**GROUP | {"prompt_id": wrong})


def test_all_that_trainers_send_is_in_the_table():
    assert set(REFUSED) >= MUST_REFUSE


@pytest.mark.parametrize(("message", "fields"), REQUESTS, ids=lambda one: getattr(one, "__name__", None))
@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_not_honoured_is_refused_with_its_reason(message, fields, field):
    if field in message.model_fields:
        assert (message, field) == (RolloutBatch, "seed") or message is SamplingParams
        return
    with pytest.raises(ValidationError) as refused:
        message(**fields, **{field: 1})
    (error,) = refused.value.errors()
    assert error["msg"] == f"Value error, {field}: {REFUSED[field]}" and "\n" not in error["msg"]


@pytest.mark.parametrize(
    ("field", "substitute"),
    [("n", "PromptGroup.samples"), ("seed", "RolloutBatch.seed"), ("stop", "SamplingParams.stop")],
)
def test_the_reason_names_the_substitute(field, substitute):
    assert substitute in REFUSED[field]


def test_a_misspelled_field_is_still_unknown():
    with pytest.raises(ValidationError, match="Extra inputs"):
        SamplingParams(temprature=1.0)


def test_a_batch_without_end_is_refused():
    group = PromptGroup(prompt_id="p", text="x", samples=MAX_SAMPLES)
    assert RolloutBatch(batch_id="b", groups=(group,)).groups[0].samples == MAX_SAMPLES
    with pytest.raises(ValidationError, match=f"{MAX_SAMPLES + 1} samples in one batch; at most {MAX_SAMPLES}"):
        RolloutBatch(batch_id="b", groups=(group, PromptGroup(prompt_id="q", text="x", samples=1)))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), None, "long"])
@pytest.mark.parametrize("quality", [0.5, 1.1, -0.1])
def test_a_prediction_is_a_number_and_a_quality(number, quality):
    with pytest.raises(ValueError, match="prediction"):
        PromptGroup(**GROUP | {"prediction": {"number": number, "quality": quality}})
