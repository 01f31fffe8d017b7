"""The gateway beside vLLM's own protocol classes: its answers are theirs, and it accepts all that theirs send.

The gateway itself does not use them, see docs/measurements/http.md; no engine starts here.
"""

import json
from collections.abc import Iterator, Set
from typing import Any

import pytest
from pydantic import BaseModel

from simulated.test_gateway_compatible import CHAT, COMPLETIONS, GIVEN, TOKENS, play  # noqa: F401 - a fixture

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
BODIES = GIVEN | {TOKENIZE: {"prompt": "5 6"}, DETOKENIZE: {"tokens": [5, 6]}}
EVERYWHERE = {"weight_versions", "tailrace"}
OURS = dict.fromkeys(BODIES, EVERYWHERE) | {
    CHAT: EVERYWHERE | {"token_id", "prompt_token_ids"},
    TOKENS: EVERYWHERE | {"id", "object", "created", "model", "token", "bytes"},
}
"""Names of fields that an answer may have where vLLM's classes do not declare them."""


def classes(path: str) -> tuple[type[BaseModel], ...]:
    """vLLM's class of a route's request, of its answer, and of an event of its stream."""
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion import protocol as completion
    from vllm.entrypoints.scale_out.token_in_token_out import protocol as tokens
    from vllm.entrypoints.serve.tokenize import protocol as tokenize

    return {
        COMPLETIONS: (
            completion.CompletionRequest, completion.CompletionResponse, completion.CompletionStreamResponse
        ),
        CHAT: (chat.ChatCompletionRequest, chat.ChatCompletionResponse, chat.ChatCompletionStreamResponse),
        TOKENS: (tokens.GenerateRequest, tokens.GenerateTokensResponse, tokens.GenerateTokensStreamResponse),
        TOKENIZE: (tokenize.TokenizeCompletionRequest, tokenize.TokenizeResponse),
        DETOKENIZE: (tokenize.DetokenizeRequest, tokenize.DetokenizeResponse),
    }[path]  # fmt: skip


def unlike(given: Any, read: Any, ours: Set[str], place: str = "answer") -> Iterator[str]:
    """Yields the places where vLLM's class reads another value than was given, or none."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name in given.keys() - read.keys():
            if name not in ours and given[name] is not None:
                yield f"{place}.{name} is not vLLM's"
        for name in given.keys() & read.keys():
            yield from unlike(given[name], read[name], ours, f"{place}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from unlike(one, other, ours, f"{place}.{number}")
    elif given != read:
        yield f"{place} is {given!r}, and vLLM's class reads {read!r}"


def declared(read: BaseModel) -> dict:
    """The fields of an answer that vLLM's classes declare; their extra ones are left out."""

    def of(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return {name: of(getattr(value, name)) for name in type(value).model_fields}
        if isinstance(value, list):
            return [of(one) for one in value]
        return {str(name): of(one) for name, one in value.items()} if isinstance(value, dict) else value

    return json.loads(json.dumps(of(read), default=vars))


def wanted(path: str, whole: bool) -> dict:
    """A request for everything that an answer can have."""
    more = {"n": 2, "seed": 3, "max_tokens": 40, "top_k": 5} | ({"prompt_logprobs": 2} if whole else {})
    if path in (TOKENIZE, DETOKENIZE):
        return BODIES[path]
    if path == TOKENS:
        return BODIES[path] | {
            "sampling_params": more | {"logprobs": 2, "sampling_mask": True},
            "return_token_ids": True,
        }
    scored = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    return BODIES[path] | more | scored | {"return_token_ids": True}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_is_one_of_vllm_s_class(play, path):  # noqa: F811
    async def story(ask, app):
        answer = await ask(path, wanted(path, whole=True))
        assert answer.status_code == 200, answer.text
        kind = classes(path)[1]
        assert not list(unlike(answer.json(), declared(kind.model_validate_json(answer.text)), OURS[path]))

    play(story)


@pytest.mark.parametrize("path", GIVEN)
def test_an_event_is_one_of_vllm_s_class(play, path):  # noqa: F811
    async def story(ask, app):
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await ask(path, wanted(path, whole=False) | {"stream": True, "stream_options": options})
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n")[:-2]]
        assert len(events) > 4, answer.text
        for event in events:
            read = classes(path)[2].model_validate_json(event)
            assert not list(unlike(json.loads(event), declared(read), OURS[path]))

    play(story)


@pytest.mark.parametrize("path", GIVEN)
def test_a_refusal_is_one_of_vllm_s_class(play, path):  # noqa: F811
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    async def story(ask, app):
        answer = await ask(path, BODIES[path] | {"x_extra": 1})
        assert answer.status_code == 400
        assert not list(unlike(answer.json(), declared(ErrorResponse.model_validate_json(answer.text)), set()))

    play(story)


@pytest.mark.parametrize("path", BODIES)
def test_a_request_of_vllm_s_class_is_accepted_with_all_its_defaults(play, path):  # noqa: F811
    from msgspec import to_builtins
    from vllm.sampling_params import SamplingParams

    async def story(ask, app):
        given = BODIES[path] | ({"sampling_params": {"max_tokens": 2}} if path == TOKENS else {})
        request = classes(path)[0].model_validate(given)
        body = request.model_dump(mode="json", warnings=False)
        if path == TOKENS:
            sampling = {name: getattr(SamplingParams(max_tokens=2), name) for name in SamplingParams.__struct_fields__}
            body["sampling_params"] = {name: to_builtins(one) for name, one in sampling.items() if name[0] != "_"}
        answer = await ask(path, body)
        assert answer.status_code == 200, answer.text

    play(story)


@pytest.mark.parametrize(
    ("given", "read", "place"),
    [
        ({"a": 1, "tailrace": 2}, {"a": 1}, None),
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2.0}], "c": 3}, None),
        ({"a": None}, {}, None),
        ({"a": [{"b": 1}]}, {"a": [{}]}, "answer.a.0.b is not vLLM's"),
        ({"a": [1, 2]}, {"a": [1]}, "answer.a is [1, 2], and vLLM's class reads [1]"),
        ({"a": 1}, {"a": "1"}, "answer.a is 1, and vLLM's class reads '1'"),
    ],
)
def test_a_value_that_vllm_s_class_reads_otherwise_is_found(given, read, place):
    assert list(unlike(given, read, EVERYWHERE)) == ([] if place is None else [place])
