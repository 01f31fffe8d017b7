"""The gateway's fields beside vLLM's: docs/http.md lists each, and each is as it says.

vLLM's are read from its source, so nothing of it is loaded. A field that a new vLLM brings fails here.
"""

import ast
import base64
import io
import re
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from image_model import features
from pydantic import BaseModel, ValidationError

from tailrace.app.gateway import answers
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.edge.honoured import IGNORED, NEUTRAL
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.requests import CompletionRequest, TokensRequest, TokensSampled
from tailrace.deployments.messages.rollout import SampleResult
from tailrace.deployments.messages.session import SampleAnswer
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
VLLM = Path(sysconfig.get_paths()["purelib"]) / "vllm"
COMPLETION = "entrypoints/openai/completion/protocol.py"
CHAT = "entrypoints/openai/chat_completion/protocol.py"
TOKENS = "entrypoints/scale_out/token_in_token_out/protocol.py"
REQUESTS = {
    "completions": [(COMPLETION, "CompletionRequest")],
    "chat": [(CHAT, "ChatCompletionRequest")],
    "tokens": [(TOKENS, "GenerateRequest"), ("sampling_params.py", "SamplingParams")],
}
ANSWERS = [
    (COMPLETION, "CompletionResponse"),
    (COMPLETION, "CompletionResponseChoice"),
    (CHAT, "ChatCompletionResponse"),
    (CHAT, "ChatCompletionResponseChoice"),
    (CHAT, "ChatMessage"),
    (TOKENS, "GenerateResponseBase"),
    (TOKENS, "GenerateTokensResponse"),
    (TOKENS, "GenerateChoiceBase"),
    (TOKENS, "GenerateTokensChoice"),
    ("entrypoints/serve/engine/protocol.py", "UsageInfo"),
]
MESSAGE = {"role": "user", "content": "a"}
OURS: dict[str, list[tuple[type[BaseModel], dict]]] = {
    "completions": [(CompletionRequest, {"prompt": "a"})],
    "chat": [(ChatRequest, {"messages": [MESSAGE]})],
    "tokens": [(TokensRequest, {"token_ids": [1]}), (TokensSampled, {})],
}
HERE = {"honoured", "partly", "no effect", "refused", "ours"}


def fields_of(places: list[tuple[str, str]]) -> set[str]:
    """The public fields of vLLM's classes."""
    found = set()
    for path, name in places:
        (body,) = (node.body for node in ast.parse((VLLM / path).read_text()).body
                   if isinstance(node, ast.ClassDef) and node.name == name)  # fmt: skip
        fields = (node for node in body if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node))
        found |= {node.target.id for node in fields if node.target.id[0] != "_"}
    return found


def rows(heading: str) -> list[list[str]]:
    """The cells of a table of the page, below its two first lines."""
    lines = PAGE.read_text().split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def listed(route: str) -> dict[str, tuple[str, str]]:
    """What the page says of the fields of a route: honoured or not, and why."""
    found = {}
    for cell, routes, here, why in rows("fields of requests"):
        if routes == "all" or route in routes.split(", "):
            for name in names(cell):
                assert name not in found, f"{name} is listed twice for {route}"
                found[name] = here, why
    return found


needs_vllm = pytest.mark.skipif(not VLLM.is_dir(), reason="vLLM's source is not there")


@needs_vllm
@pytest.mark.parametrize("route", REQUESTS)
def test_every_field_of_vllm_s_requests_is_listed_and_no_other(route):
    theirs = {name for name, (here, _) in listed(route).items() if here != "ours"}
    assert theirs == fields_of(REQUESTS[route])
    assert not fields_of(REQUESTS[route]) & (set(listed(route)) - theirs)


@pytest.mark.parametrize("route", REQUESTS)
def test_a_difference_is_explained(route):
    for name, (here, why) in listed(route).items():
        assert here in HERE and (why or here == "honoured"), name


@pytest.mark.parametrize("route", REQUESTS)
def test_fields_are_as_listed(route):
    known = {name for model, _ in OURS[route] for name in model.model_fields}
    for name, (here, _) in listed(route).items():
        assert (name in known) == (here in ("honoured", "partly", "ours")), name
        if here == "refused":
            assert refused(route, name), name
        if here == "no effect":
            assert name in IGNORED or set(NEUTRAL[name]) == {True, False}, name
    assert known <= set(listed(route)), "a field that is not listed"


def refused(route: str, name: str) -> bool:
    """Whether every model of the route refuses the field, by its name, with a value that means something."""
    for model, fields in OURS[route]:
        try:
            model(**fields, **{name: "something"})
        except ValidationError as error:
            if f"{name}: " not in str(error):
                return False
        else:
            return False
    return True


def test_nothing_is_ignored_without_being_listed():
    everywhere = {name for route in REQUESTS for name in listed(route)}
    openai_s = {"service_tier", "store", "metadata", "safety_identifier", "prompt_cache_key", "early_stopping"}
    assert everywhere >= IGNORED - openai_s
    assert everywhere >= set(NEUTRAL) - {"best_of"}, "an older vLLM's"


ROUTES = np.array([[[3, 1]], [[0, 2]]], np.uint8)


def answered() -> list[dict]:
    """An answer of each route, with all that can be asked for."""
    logprobs = (-1.0, -2.0)
    sample = SampleResult(sample_index=0, token_ids=(5, 6), text="56", logprobs=logprobs, raw_logprobs=logprobs,
                          finish_reason=SampleEnd.STOP, routed_experts=ROUTES)  # fmt: skip
    one = SampleAnswer(batch_id="b", group="g", prompt_token_ids=(1,), prompt_key="", step=0, sample=sample)
    prompts = SimpleNamespace(piece=str)
    model, naming = SimpleNamespace(name="m", prompts=prompts), Naming(0, 0, "g", 0)
    chat_request = ChatRequest(messages=[MESSAGE], logprobs=True, return_token_ids=True)
    parser = SimpleNamespace(
        special=False,
        is_named=False,
        message=lambda *_: ({"role": "assistant", "content": "", "reasoning": "", "tool_calls": [{}]}, 1),
    )
    chat = SimpleNamespace(
        request=chat_request, parser=parser, prompt={"token_ids": (1,)}, keep=lambda *_: None, finds_thoughts=True
    )
    completion = CompletionRequest(prompt="a", logprobs=1, return_token_ids=True)
    with_features = {"features": features((1, 0), length=1), "return_token_ids": True}
    return [
        answers.completion(completion, model, naming, [[one]]),
        answers.chat_completion(chat, model, naming, [[one]]),
        answers.tokens(TokensRequest(token_ids=[1], **with_features), model, naming, [[one]]),
    ]


def given_fields() -> set[str]:
    found = set()
    for answer in answered():
        for part in (
            answer,
            answer["usage"],
            *answer["choices"],
            *(one.get("message", {}) for one in answer["choices"]),
        ):
            found |= part.keys()
    return found


@needs_vllm
def test_every_field_of_vllm_s_answers_is_listed_as_it_is():
    listed_as = {}
    for cell, here, why in rows("fields of answers"):
        for name in names(cell):
            assert name not in listed_as and why
            listed_as[name] = here
    vllm_s, ours = fields_of(ANSWERS), given_fields()
    assert set(listed_as) == vllm_s | ours
    for name, here in listed_as.items():
        assert here == ("ours" if name not in vllm_s else "given" if name in ours else "absent"), name


def test_routed_experts_are_read_as_vllm_s_and_by_our_client():
    """vLLM's own recipe, in a comment of its protocol."""
    for answer in answered():
        text = answer["choices"][0]["routed_experts"]
        np.testing.assert_array_equal(np.load(io.BytesIO(base64.b64decode(text))), ROUTES)
        assert RoutedExperts.of(text).array.dtype == np.uint8


def test_an_answer_that_calls_tools_says_so():
    _, chat, _ = answered()
    assert chat["choices"][0]["finish_reason"] == "tool_calls"
