"""Requests of `/v1/chat/completions`: messages with tool calls, tools, and arguments of the chat template.

Source of names, defaults and forms: vLLM 0.32, `entrypoints/openai/chat_completion/protocol.py`,
`entrypoints/generate/base/protocol.py` and `renderers/chat_utils.py`.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.app.gateway.requests import Answered
from tailrace.deployments.messages.sampling import MAX_LOGPROBS

TEMPLATE_OWN = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not the template's: a request cannot give them."""


class TextPart(BaseModel):
    """A piece of a message's content; only text has a meaning here."""

    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: str = "{}"


class RequestedCall(BaseModel):
    """A call of a tool that an earlier answer made."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict:
        """As templates take it: arguments as an object. Raises ValueError if they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"messages: arguments of a call of {self.function.name!r} are not a JSON object")
        called = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": called}


class RequestedMessage(BaseModel):
    """One message. Other fields of an answer, as clients send them back, may be there if they are empty."""

    model_config = ConfigDict(extra="allow")
    role: str = Field(min_length=1)
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[RequestedCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _honoured(self):
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}, ""):
                raise ValueError(f"{name}: not honoured in a message; remove it")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is not there; give a text")
        return self

    def text(self) -> str:
        """Raises ValueError if its content is not text alone."""
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        if any(part.type != "text" or part.text is None for part in self.content):
            raise ValueError("messages: content of another type than text is not honoured here")
        return "\n".join(part.text for part in self.content)

    def normal(self) -> dict[str, Any]:
        """The same for messages that mean the same."""
        found = {"role": self.role, "content": self.text(), "name": self.name, "tool_call_id": self.tool_call_id}
        found["tool_calls"] = [call.model_dump() for call in self.tool_calls or ()]
        return {name: value for name, value in found.items() if value not in (None, [])}

    def for_template(self) -> dict[str, Any]:
        """As templates take it."""
        calls = [call.for_template() for call in self.tool_calls or ()]
        return self.normal() | ({"tool_calls": calls} if calls else {})


class ToolFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["function"] = "function"
    function: ToolFunction

    def for_template(self) -> dict:
        function = self.function.model_dump()
        if function["strict"] is None:
            del function["strict"]
        return {"type": self.type, "function": function}


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class NamedTool(BaseModel):
    """The choice of one tool."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Answered):
    """`/v1/chat/completions`."""

    messages: list[RequestedMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fitting(self):
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: set logprobs to true with it")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: set add_generation_prompt to false with it")
        names = {tool.function.name for tool in self.tools or ()}
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if chosen is not None and chosen not in names:
            raise ValueError(f"tool_choice: {chosen!r} is not in tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required, and there are no tools; give some")
        if own := TEMPLATE_OWN & (self.chat_template_kwargs or {}).keys():
            raise ValueError(f"chat_template_kwargs: {min(own)} is not the template's; remove it")
        return self

    def likeliest(self) -> int:
        return self.top_logprobs or 0

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def template(self) -> dict[str, Any]:
        """Arguments of the chat template, besides messages and the generation prompt."""
        tools = [tool.for_template() for tool in self.tools or ()]
        return ({"tools": tools} if tools else {}) | (self.chat_template_kwargs or {})
