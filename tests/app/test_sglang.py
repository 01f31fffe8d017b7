"""SGLang's `/generate` without a service: docs/sglang.md lists each field, and each is as it says; forms of answers.

SGLang's own fields are in tests/data/sglang_fields.json, read from the source that it names.
"""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.service import ServedModel, Wanted
from tailrace.app.gateway.sglang.answers import GenerateStream, generated
from tailrace.app.gateway.sglang.requests import IGNORED, GenerateRequest, SglangSampling
from tailrace.app.gateway.sglang.routes import DiskUpdate
from tailrace.deployments.messages.rollout import PromptLogprobs, SampleResult
from tailrace.deployments.messages.session import SampleAnswer, SampleTokens
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd

PAGE = Path(__file__).parents[2] / "docs" / "sglang.md"
FIELDS = json.loads((Path(__file__).parents[1] / "data" / "sglang_fields.json").read_text())
THEIRS = {"generate": FIELDS["generate"], "sampling": FIELDS["sampling_params"]}
OURS = {"generate": (GenerateRequest, {"input_ids": [1]}), "sampling": (SglangSampling, {})}
NAMING = Naming(seed=3, step=1, group="g", index=5)


class Letters:
    """A tokenizer whose token n is the n-th letter; 0 is special."""

    def decode(self, token_ids, special=False):
        return "".join("<end>" if token == 0 else chr(96 + token) for token in token_ids if token or special)


MODEL = ServedModel("letters", "/letters", 64, Letters())


def listed(kind: str) -> dict[str, str]:
    """What the page says of the fields of an object: honoured or not."""
    lines = PAGE.read_text().split("| fields of requests |")[1].split("\n\n")[0].splitlines()[2:]
    found = {}
    for fields, of, here, why in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
        if of == kind:
            for name in re.findall(r"`([^`]+)`", fields):
                assert name not in found and (why or here == "honoured"), name
                found[name] = here
    return found


@pytest.mark.parametrize("kind", THEIRS)
def test_every_field_of_sglang_is_listed_and_as_listed(kind):
    (model, given), said = OURS[kind], listed(kind)
    assert set(said) == set(THEIRS[kind])
    for name, here in said.items():
        assert (name in model.model_fields) == (here in ("honoured", "partly")), name
        assert (name in IGNORED) == (here == "no effect"), name
        if here == "refused":
            with pytest.raises(ValidationError, match=name):
                model(**given, **{name: "something"})
            model(**given, **{name: None})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "input_ids: give a prompt"),
        ({"input_ids": [1], "text": "a"}, "by either input_ids or text"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid: 1 ids for 2 prompts"),
        ({"input_ids": [1], "stream": True, "logprob_start_len": 0}, "logprob_start_len: not with stream"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens: 0 makes no token"),
        ({"input_ids": [1], "custom_logit_processor": "gASV"}, "custom_logit_processor: it is pickled code"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_one_line(given, reason):
    with pytest.raises(ValidationError, match=reason):
        GenerateRequest(**given)


def test_sampling_params_are_ours_by_name():
    sampled = SglangSampling(
        temperature=0.5, top_k=-1, json_schema='{"type": "object"}', stop=["x"], logit_bias={"3": 1.0}
    )
    params = sampled.params(prompt_logprobs=True, top_logprobs=2)
    assert (params.temperature, params.top_k, params.stop) == (0.5, 0, ("x",))
    assert params.structured_outputs.json_schema == '{"type": "object"}' and params.logit_bias == ((3, 1.0),)
    assert (params.prompt_logprobs, params.top_logprobs) == (0, 2)
    plain = SglangSampling(min_new_tokens=2).params(False, 0)
    assert plain.prompt_logprobs is None and plain.min_tokens == 2


@pytest.mark.parametrize(("given", "bound"), [({}, 128), ({"max_new_tokens": None}, None), ({"max_new_tokens": 9}, 9)])
def test_null_is_as_many_tokens_as_there_is_room_for(given, bound):
    assert SglangSampling(**given).bound == bound


def answered(tokens: tuple[int, ...], end=SampleEnd.STOP, **more) -> SampleAnswer:
    sample = SampleResult(
        sample_index=5, token_ids=tokens, logprobs=tuple(-float(token) for token in tokens), raw_logprobs=(),
        finish_reason=end, segments=(), text=Letters().decode(tokens), **more,
    )  # fmt: skip
    return SampleAnswer(batch_id="b", group="g", prompt_token_ids=(7, 8, 9), prompt_key="p", step=1, sample=sample)


@pytest.mark.parametrize(
    ("answer", "finish"),
    [
        (answered((1, 2, 0)), {"type": "stop", "matched": 0}),
        (answered((1, 2), stop_reason="b"), {"type": "stop", "matched": "b"}),
        (answered((1, 2), SampleEnd.LENGTH), {"type": "length", "length": 2}),
        (
            answered((1,), SampleEnd.CANCELLED),
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        ),
    ],
)
def test_an_answer_says_how_it_ended(answer, finish):
    request = GenerateRequest(input_ids=[7, 8, 9], rid="mine", return_logprob=True)
    found = generated(request, MODEL, NAMING, [[answer]])
    tokens = answer.sample.token_ids
    about = found["meta_info"]
    assert found["output_ids"] == list(tokens) and about["finish_reason"] == finish and about["id"] == "mine"
    assert about["output_token_logprobs"] == [[-float(token), token, None] for token in tokens]
    assert (about["prompt_tokens"], about["completion_tokens"]) == (3, len(tokens))
    assert about["tailrace"]["index"] == 5 and about["input_token_logprobs"] == []


def test_text_is_with_its_end_if_asked():
    trimmed, whole = (
        GenerateRequest(input_ids=[7], sampling_params={"no_stop_trim": whole, "skip_special_tokens": not whole})
        for whole in (False, True)
    )
    answer = [[answered((1, 2, 0))]]
    assert generated(trimmed, MODEL, NAMING, answer)["text"] == "ab"
    assert generated(whole, MODEL, NAMING, answer)["text"] == "ab<end>"


def test_several_prompts_and_samples_are_a_list_in_their_order():
    request = GenerateRequest(input_ids=[[7], [8]], rid="r", sampling_params={"n": 2})
    answers = [[answered((1,)), answered((2,))], [answered((3,)), answered((4,))]]
    found = generated(request, MODEL, NAMING, answers)
    assert [one["output_ids"] for one in found] == [[1], [2], [3], [4]]
    assert [one["meta_info"]["id"] for one in found] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]


def test_logprobs_of_the_prompt_begin_where_asked():
    known = PromptLogprobs(logprobs=(-1.0, -2.0), ranks=(1, 1), top=((), ()))
    request = GenerateRequest(input_ids=[7, 8, 9], return_logprob=True, logprob_start_len=1)
    found = generated(request, MODEL, NAMING, [[answered((1,), prompt_logprobs=known)]])
    assert found["meta_info"]["input_token_logprobs"] == [[-1.0, 8, None], [-2.0, 9, None]]


def test_routes_are_int32_of_all_positions_but_the_last():
    routes = RoutedExperts(np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2))
    answer = [[answered((1, 0), routed_experts=routes)]]
    request = GenerateRequest(input_ids=[7, 8, 9], return_routed_experts=True)
    found = generated(request, MODEL, NAMING, answer)["meta_info"]
    read = np.frombuffer(base64.b64decode(found["routed_experts"]), np.int32)
    about = found["prompt_tokens"] + found["completion_tokens"] - 1
    assert np.array_equal(read.reshape(about, 2, 2), routes.array) and found["routed_experts_start_len"] == 0
    with pytest.raises(ValueError, match="return_routed_experts: the engines keep none"):
        generated(request, MODEL, NAMING, [[answered((1,))]])


def test_each_event_of_a_stream_has_all_so_far():
    request = GenerateRequest(input_ids=[7], rid="mine", stream=True, return_logprob=True)
    stream = GenerateStream(request, MODEL, NAMING, Wanted([{"token_ids": (7,)}], 1, 9, request.sampling()))
    parts = [
        SampleTokens(start=0, prompt_token_ids=(7, 8, 9)),
        SampleTokens(start=0, token_ids=(1, 2), logprobs=(-1.0, -2.0)),
        SampleTokens(start=2, token_ids=(3,), logprobs=(-3.0,)),
        SampleTokens(start=3, answer=answered((1, 2, 3, 0))),
    ]
    events = [event for part in parts for event in stream.events(0, part)]
    assert [event["output_ids"] for event in events] == [[1], [1, 2], [1, 2, 3, 0]]
    assert [event["text"] for event in events] == ["a", "ab", "abc"]
    assert [bool(event["meta_info"]["finish_reason"]) for event in events] == [False, False, True]
    assert {event["meta_info"]["id"] for event in events} == {"mine"}
    assert events[1]["meta_info"]["output_token_logprobs"] == [[-1.0, 1, None], [-2.0, 2, None]]


def test_an_update_from_disk_takes_safetensors_alone_and_no_unknown_field():
    """Of SGLang's fields, `manifest` is refused, and none that could change the weights is ignored."""
    given = set(FIELDS["update_weights_from_disk"])
    assert given - set(DiskUpdate.model_fields) == {"manifest"} and DiskUpdate(model_path="w", load_format="auto")
    for wrong in ({"load_format": "dummy"}, {"manifest": {}}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            DiskUpdate(model_path="w", **wrong)
