"""Answers of the gateway, made from samples by hand: every value is in its own place, and failures are named."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from tailrace.app.gateway import answers
from tailrace.app.gateway.access_control import token_of
from tailrace.app.gateway.metrics import add_metrics
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.service import ServedModel
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import PromptLogprobs, Segment
from tailrace.policies.protocol.actions import SampleEnd

MODEL = ServedModel("model", "/models/model", 512, SimpleNamespace(piece=lambda token: f"<{token}>"))
NAMING = Naming(group="g", seed=5, step=6, index=None, turn=2)


def segment(version: int, start: int, end: int, replica: str = "r", adapter: str = "") -> Segment:
    return Segment(weights_version=version, weights_digest=f"d{version}", adapter_digest=adapter, replica_id=replica,
                   start=start, end=end)  # fmt: skip


def sample(index: int = 1, end: SampleEnd = SampleEnd.STOP, **others) -> SimpleNamespace:
    values = {
        "sample_index": index, "token_ids": (7, 8), "logprobs": (-0.5, -1.5), "top_logprobs": (), "sampling_mask": (),
        "finish_reason": end, "stop_reason": None, "error": None, "routed_experts": None,
        "segments": (segment(3, 0, 2),), "text": "ab",
        "prompt_logprobs": None,
    }  # fmt: skip
    return SimpleNamespace(**(values | others))


def answer(**others) -> SimpleNamespace:
    return SimpleNamespace(sample=sample(**others), group="g", prompt_token_ids=(1, 2, 3))


def test_logprobs_are_in_the_form_that_was_asked_for():
    tops = (((7, -0.5), (9, -2.0)), ((8, -1.5),))
    found, after = answers.completion_logprobs(sample(top_logprobs=tops), MODEL, False, 10)
    assert found == {
        "tokens": ["<7>", "<8>"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"<7>": -0.5, "<9>": -2.0}, {"<8>": -1.5}],
        "text_offset": [10, 13],
    }
    assert after == 16
    found, _ = answers.completion_logprobs(sample(logprobs=(-0.5, float("-inf"))), MODEL, True, 0)
    assert found["tokens"] == ["token_id:7", "token_id:8"] and found["token_logprobs"] == [-0.5, -9999.0]


def test_a_chat_s_logprobs_name_each_token_with_its_bytes_and_its_likeliest():
    first, second = answers.chat_logprobs(sample(top_logprobs=(((9, -2.0),), ())), MODEL, False)
    assert first == {
        "token": "<7>", "token_id": 7, "logprob": -0.5, "bytes": [60, 55, 62],
        "top_logprobs": [{"token": "<9>", "token_id": 9, "logprob": -2.0, "bytes": [60, 57, 62]}],
    }  # fmt: skip
    assert second["token"] == "<8>" and second["top_logprobs"] == []
    for one in answers.tokens_logprobs(sample(), MODEL):
        assert one["token"].startswith("token_id:") and one["top_logprobs"] == [answers.without_top(one)]


def test_an_end_says_all_that_the_tokens_depend_on():
    spans = (segment(3, 0, 1, "a", "poet"), segment(3, 1, 4, "b"), segment(4, 4, 6))
    assert answers.end(NAMING, answer(index=4, end=SampleEnd.LENGTH, segments=spans)) == {
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [{"version": "3", "start": 0, "end": 4}, {"version": "4", "start": 4, "end": 6}],
        "tailrace": {"seed": 5, "step": 6, "group": "g", "index": 4, "turn": 2, "adapter_digest": "poet",
                     "weights_digests": {"3": "d3", "4": "d4"}},
    }  # fmt: skip
    assert "adapter_digest" not in answers.end(NAMING, answer())["tailrace"]


def completion_request(**others) -> SimpleNamespace:
    values = {"logprobs": None, "return_tokens_as_token_ids": None, "return_token_ids": None,
              "skip_special_tokens": True, "include_stop_str_in_output": False}  # fmt: skip
    return SimpleNamespace(**(values | others))


def test_a_completion_counts_its_choices_on_over_its_prompts_and_each_prompt_once():
    two = [[answer(index=0), answer(index=1)], [answer(index=0, token_ids=(4,), logprobs=(-1.0,))]]
    found = answers.completion(completion_request(logprobs=1, return_token_ids=True), MODEL, NAMING, two)
    assert [one["index"] for one in found["choices"]] == [0, 1, 2]
    assert [one["tailrace"]["index"] for one in found["choices"]] == [0, 1, 0]
    assert [one["token_ids"] for one in found["choices"]] == [[7, 8], [7, 8], [4]]
    assert found["choices"][2]["prompt_token_ids"] == [1, 2, 3] and found["choices"][2]["logprobs"]["tokens"] == ["<4>"]
    assert found["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
    assert (found["object"], found["model"]) == ("text_completion", "model") and found["id"].startswith("cmpl-")
    plain = answers.completion(completion_request(), MODEL, NAMING, two)["choices"][0]
    assert plain["logprobs"] is None and plain["token_ids"] is None and plain["prompt_token_ids"] is None


def test_a_prompt_s_logprobs_begin_at_its_second_token_and_have_ranks():
    scores = PromptLogprobs(logprobs=(-1.0, -2.0), ranks=(1, 5), top=(((2, -1.0),), ((9, -0.1),)))
    assert answers.prompt_logprobs(answer(prompt_logprobs=scores), MODEL) == [
        None,
        {"2": {"logprob": -1.0, "rank": 1, "decoded_token": "<2>"}},
        {"3": {"logprob": -2.0, "rank": 5, "decoded_token": "<3>"},
         "9": {"logprob": -0.1, "rank": 1, "decoded_token": "<9>"}},
    ]  # fmt: skip
    assert answers.prompt_logprobs(answer(), MODEL) is None


def test_failures_are_the_errors_of_failed_samples_alone():
    assert answers.failures([[answer()], [answer(end=SampleEnd.LENGTH)]]) == []
    failed = answer(end=SampleEnd.FAILED, error="engines ended it")
    assert answers.failures([[answer()], [failed, answer(end=SampleEnd.FAILED)]]) == ["engines ended it", ""]


def test_models_are_the_served_one_and_then_its_adapters():
    found = answers.models(MODEL, [Adapter("poet", 2, "d", "/poet")])
    same = {"object": "model", "created": 0, "owned_by": "tailrace", "max_model_len": 512}
    assert found["data"][0] == {"id": "model", "root": "/models/model", "parent": None} | same
    poet = {"id": "poet", "root": "/poet", "parent": "model", "tailrace": {"version": 2, "digest": "d"}}
    assert found["data"][1] == poet | same and len(found["data"]) == 2


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (b"Bearer abc", b"abc"),
        (b"bearer  abc ", b"abc"),
        (b"Basic cm9sZTphYmM=", b"abc"),
        (b"basic cm9sZTphYmM=", b"abc"),
        (b"Basic cm9s!ZTphYmM=", b""),  # no base64
        (b"Basic cm9sZQ==", b""),  # no colon
        (b"Digest abc", b""),
        (b"", b""),
    ],
)
def test_a_token_is_read_from_a_bearer_s_or_a_basic_header(header, token):
    assert token_of(header) == token


@pytest.mark.parametrize(
    ("method", "path", "counted", "reason"),
    [
        ("GET", "/raises", ("/raises", "500"), None),  # its status was 0, as if the client had left
        ("POST", "/raises", ("/raises", "405"), "route"),
        ("GET", "/none", ("none", "404"), "route"),
    ],
)
def test_a_request_is_counted_by_the_status_of_its_answer(method, path, counted, reason):
    app = FastAPI()

    @app.get("/raises")
    async def raises():
        raise RuntimeError("a fault")

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        if "status" in message:
            assert str(message["status"]) == counted[1]

    async def story():
        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        with pytest.raises(RuntimeError, match="a fault") if counted[1] == "500" else nullcontext():
            await app(scope, receive, send)

    add_metrics(app)
    asyncio.run(story())
    metrics = app.state.metrics
    assert metrics._requests == {counted: 1} and +metrics._refused == ({} if reason is None else {(reason,): 1})
