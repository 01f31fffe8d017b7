"""Anthropic's Messages API below a trajectory, by vLLM's protocol classes and conversion.

Loads vLLM, so it is imported at the first request. Source: vLLM 0.32, `entrypoints/anthropic`.
"""

import json
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import JSONResponse
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from tailrace.app.gateway.chat.messages import CalledFunction
from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.edge.errors import error_body, error_of
from tailrace.app.gateway.trajectories.harness import Harness
from tailrace.app.http.event_stream import NamedEventStream

SERVING = object.__new__(AnthropicServingMessages)
"""vLLM's conversion, which uses no state of its server."""

BUDGET = {"thinking_token_budget"}
"""Of `thinking`, which harnesses send to any model: thoughts have no budget of their own here, but `max_tokens`."""

UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of a refused `thread`, by which Anthropic's clients (2.14) send whole conversations from then on."""


async def messages(harness: Harness, body: dict, http: Request):
    """Makes a turn."""
    if (refused := _refused(body)) is not None:
        return refused
    asked = AnthropicMessagesRequest(**body)
    turn = await harness.turn(http)
    return await harness.answer(http, turn, await chat_request(harness, asked), _whole, _streamed)


async def count_tokens(harness: Harness, body: dict, http: Request):
    """Returns the tokens of the prompt that `messages` would make; begins no turn."""
    if (refused := _refused(body)) is not None:
        return refused
    request = await chat_request(harness, AnthropicCountTokensRequest(**body))
    _, chat = await harness.chat(await harness.turn(http), request)
    return {"input_tokens": len(chat.token_ids)}


def _refused(body: dict) -> JSONResponse | None:
    """Refuses a field that vLLM ignores, and without which a request means something else. Raises ValueError for one
    that no client leaves out by itself.
    """
    if body.get("thread") is not None:
        line = "thread: conversations are not kept under a message's id; send all messages, without it"
        refused = error_body(400, line)["error"] | {"details": UNTHREADED}
        return JSONResponse({"type": "error", "error": refused}, 400)
    if body.get("compaction") is not None:
        raise ValueError("compaction: not honoured here; remove it")
    return None


async def chat_request(harness: Harness, asked: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> ChatRequest:
    """Returns the same request as a chat."""
    template = getattr((await harness.service.model()).prompts.tokenizer, "chat_template", None)
    merges = AnthropicServingMessages._detect_merge_inline_system(template)
    found = SERVING.to_chat_completion_request(asked, merge_inline_system=merges)
    return ChatRequest(**found.model_dump(exclude_unset=True, exclude_none=True, exclude=BUDGET))


def _whole(completion: dict) -> dict:
    for call in completion["choices"][0]["message"].get("tool_calls", ()):
        function = call["function"]
        if CalledFunction(**function).parsed() is None:  # vLLM's conversion would raise
            function["arguments"] = "{}"
    found = SERVING.messages_full_converter(ChatCompletionResponse.model_validate(completion))
    return found.model_dump(exclude_none=True)


def _streamed(events: AsyncIterator[dict]) -> NamedEventStream:
    async def lines() -> AsyncIterator[str]:
        async for event in events:
            yield f"data: {json.dumps(event)}"
        yield "data: [DONE]"

    return NamedEventStream(SERVING.message_stream_converter(lines()), _error)


def _error(error: Exception) -> dict:
    body, _ = error_of(error)
    return {"type": "error", "error": {"type": "api_error", "message": body["error"]["message"]}}
