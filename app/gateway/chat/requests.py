"""Requests of `/v1/chat/completions`: messages with tool calls, tools, and arguments of the chat template.

Source of names, defaults and forms: vLLM 0.32, `entrypoints/openai/chat_completion/protocol.py`,
`entrypoints/generate/base/protocol.py` and `renderers/chat_utils.py`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tailrace.app.gateway.chat.messages import RequestedMessage
from tailrace.app.gateway.edge.errors import FieldRefused
from tailrace.app.gateway.edge.fields import Listed, RequestObject
from tailrace.app.gateway.requests import Answered
from tailrace.deployments.messages.sampling import MAX_LOGPROBS

TEMPLATE_OWN = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not the template's: a request cannot set them."""


class ToolFunction(RequestObject):
    """`parameters`: a JSON schema. Other keys do not enter vLLM's prompts either."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Tool(RequestObject):
    type: Literal["function"] = "function"
    function: ToolFunction
    defer_loading: bool | None = None

    def for_template(self) -> dict:
        """Returns the tool in the format of templates: `strict` and `defer_loading` only if they are given."""
        function = self.function.model_dump()
        if function["defer_loading"] is None:
            function["defer_loading"] = self.defer_loading
        for name in ("strict", "defer_loading"):
            if function[name] is None:
                del function[name]
        more = {} if self.defer_loading is None else {"defer_loading": self.defer_loading}
        return {"type": self.type, "function": function} | more


class NamedFunction(RequestObject):
    name: str


class NamedTool(RequestObject):
    """The choice of one tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Templated(RequestObject):
    """The chat of a request, and arguments of its template; also of `/tokenize`."""

    messages: Annotated[list[RequestedMessage], Listed, Field(min_length=1)]
    tools: Annotated[list[Tool], Listed] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _of_a_template(self):
        if self.tools == []:
            raise FieldRefused(
                "`tools` must not be an empty array; give a tool or remove it",
                "tools",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: set add_generation_prompt to false with it")
        if own := TEMPLATE_OWN & (self.chat_template_kwargs or {}).keys():
            raise ValueError(f"chat_template_kwargs: {min(own)} is not the template's; remove it")
        return self

    @property
    def has_images(self) -> bool:
        return any(message.has_images for message in self.messages)

    def template(self) -> dict[str, Any]:
        """Returns arguments of the chat template, besides messages and the generation prompt."""
        tools = [tool.for_template() for tool in self.tools or ()]
        return ({"tools": tools} if tools else {}) | (self.chat_template_kwargs or {})


class ChatRequest(Answered, Templated):
    """`/v1/chat/completions`."""

    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[dict[str, str]], Listed] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _fitting(self):
        if self.top_logprobs and not self.logprobs:
            raise FieldRefused("`top_logprobs`: set `logprobs` to true with it", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise FieldRefused("When using `tool_choice`, `tools` must be set.", "tool_choice")
        names = {tool.function.name for tool in self.tools or ()}
        if self.chosen is not None and self.chosen not in names:
            raise FieldRefused(f"`tool_choice`: {self.chosen!r} is none of `tools`", "tool_choice")
        return self

    @property
    def chosen(self) -> str | None:
        """Returns the name of the tool that the answer has to call."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    @property
    def bound(self) -> tuple[str, int | None]:
        """Returns the field that limits the answer, and its tokens."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def likeliest(self) -> int:
        return self.top_logprobs or 0

    @property
    def may_call(self) -> bool:
        """Returns whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def template(self) -> dict[str, Any]:
        """Returns the arguments as vLLM does: `reasoning_effort` switches the thoughts of templates that have a
        switch.
        """
        found = super().template() | ({"documents": self.documents} if self.documents else {})
        if self.reasoning_effort is not None:
            thinks = {"enable_thinking": self.reasoning_effort != "none"}
            found = thinks | found | {"reasoning_effort": self.reasoning_effort}
        return found
