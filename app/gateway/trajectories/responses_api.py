"""OpenAI's Responses API below a trajectory, by vLLM's protocol classes: stateless, and by `previous_response_id`.

Loads vLLM, so it is imported at the first request. Source: vLLM 0.32, `entrypoints/openai/responses`.
"""

import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

from fastapi import Request
from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    construct_tool_dicts,
    reuse_streamed_item_ids,
)

from tailrace.app.gateway.chat.requests import ChatRequest
from tailrace.app.gateway.edge.errors import error_of
from tailrace.app.gateway.trajectories.harness import Harness
from tailrace.app.gateway.trajectories.turn import TurnInProgress
from tailrace.app.http.event_stream import NamedEventStream

SAME = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "parallel_tool_calls",
    "include_stop_str_in_output", "chat_template_kwargs", "structured_outputs", "stream",
)  # fmt: skip
"""Fields that chats have under the same name."""

REFUSED = ("background", "previous_input_messages", "enable_response_messages", "max_tool_calls", "conversation")
"""Fields that would change the answer, and are not honoured."""


async def responses(harness: Harness, body: dict, http: Request):
    """Makes a turn. Raises ValueError, one line, for a field that is not honoured."""
    given = {name: value for name, value in body.items() if name != "request_id"}  # an id of the client's may be known
    asked = ResponsesRequest(**given)
    if wrong := [name for name in REFUSED if getattr(asked, name, None) or body.get(name)]:
        raise ValueError(f"{wrong[0]}: not honoured here; remove it")
    turn = await harness.turn(http)
    added = construct_input_messages(request_input=asked.input)
    if asked.store:
        turn.store(asked.request_id, asked.previous_response_id, added)
    before = turn.tree.said(asked.previous_response_id)
    answered = TurnResponse(asked, turn)
    return await harness.answer(http, turn, chat_request(asked, before + added), answered.whole, answered.streamed)


def chat_request(asked: ResponsesRequest, messages: list) -> ChatRequest:
    """Returns the same request as a chat."""
    given = asked.model_dump(include=set(SAME), exclude_unset=True, exclude_none=True)
    head = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    given |= {"messages": [*head, *messages], "max_completion_tokens": asked.max_output_tokens}
    if asked.stream:
        given["stream_options"] = {"include_usage": True}
    if asked.reasoning is not None:
        given["reasoning_effort"] = asked.reasoning.effort
    if tools := construct_tool_dicts(asked.tools, asked.tool_choice):
        given |= {"tools": tools, "tool_choice": _choice(asked.tool_choice)}
    form = None if asked.text is None or asked.text.format is None else asked.text.format.model_dump(by_alias=True)
    if form is not None and form["type"] == "json_schema":
        given["response_format"] = {"type": "json_schema", "json_schema": form}
    elif form is not None:
        given["response_format"] = form
    return ChatRequest(**given)


def _choice(given: Any) -> Any:
    name = getattr(given, "name", None)
    return given if name is None else {"type": "function", "function": {"name": name}}


class TurnResponse:
    """The response to one request."""

    def __init__(self, asked: ResponsesRequest, turn: TurnInProgress):
        self._asked, self._turn, self._created_s = asked, turn, int(time.time())
        self._number = 0  # of the next event

    def whole(self, completion: dict) -> dict:
        """Returns a whole answer. `completion`: the same as a chat completion."""
        return self._ended(completion["choices"][0]["finish_reason"], completion["usage"], [])

    def streamed(self, events: AsyncIterator[dict]) -> NamedEventStream:
        """Returns the events of a streamed answer. `events`: those of the chat completion."""
        return NamedEventStream(self._numbered(events), self._error)

    async def _numbered(self, events: AsyncIterator[dict]) -> AsyncIterator[dict]:
        async for event in self._events(events):
            event["sequence_number"] = self._number
            self._number += 1
            yield event

    def _error(self, error: Exception) -> dict:
        found = error_of(error)[0]["error"]
        about = {"code": found["type"], "message": found["message"], "param": found["param"]}
        return {"type": "error", "sequence_number": self._number} | about

    async def _events(self, events: AsyncIterator[dict]) -> AsyncIterator[dict]:
        begun = self._response("in_progress", [], None)
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        processor = SimpleStreamingEventProcessor(tools=self._asked.tools)
        finish_reason, usage = None, None
        async for event in events:
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                finish_reason = choice["finish_reason"] or finish_reason
                for found in _deltas(processor, choice["delta"]):
                    yield found.model_dump(mode="json", by_alias=True)
        for found in processor.close_current():
            yield found.model_dump(mode="json", by_alias=True)
        response = self._ended(finish_reason, usage, processor.output_items)
        yield {"type": "response.completed", "response": response}

    def _ended(self, finish_reason: str, usage: dict, streamed: list) -> dict:
        message = self._turn.answer
        calls = [FunctionCall(id=one["id"], **one["function"]) for one in message.get("tool_calls") or ()]
        output = build_response_output_items(
            message.get("reasoning"), message["content"], calls, None, self._asked.tools
        )
        reuse_streamed_item_ids(output, streamed)
        statuses = {"length": "incomplete", "abort": "cancelled"}
        return self._response(statuses.get(finish_reason, "completed"), output, usage)

    def _response(self, status: str, output: list, usage: dict | None) -> dict:
        asked = self._asked
        sampling = SimpleNamespace(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            max_tokens=asked.max_output_tokens or self._turn.tree.opening.limits.tokens,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logprobs=None,
        )
        name = asked.model or ""
        used = None if usage is None else _usage(usage)
        found = ResponsesResponse.from_request(asked, sampling, name, self._created_s, output, status, used)
        return found.model_dump(mode="json", by_alias=True)


def _deltas(processor: SimpleStreamingEventProcessor, delta: dict) -> Iterator[Any]:
    for one in split_delta(DeltaMessage(**{name: value for name, value in delta.items() if name != "role"})):
        state, call = processor.resolve_target_state(one)
        if state.name == "NONE":
            continue
        if processor.needs_transition(state, call):
            yield from processor.close_current()
            yield from processor.open(state, call)
        yield from processor.emit_delta(one, None)


def _usage(usage: dict) -> ResponseUsage:
    thoughts = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return ResponseUsage(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=thoughts),
    )
