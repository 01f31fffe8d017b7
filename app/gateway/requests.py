"""Requests of vLLM's routes, as far as they are honoured: any other field with a value that means something is refused.

Invariant: no field is ignored that could change a token. Source of names and defaults: vLLM 0.32,
`entrypoints/openai/{completion,chat_completion}/protocol.py`, `entrypoints/scale_out/token_in_token_out/protocol.py`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.deployments.messages.refusals import REFUSED
from tailrace.deployments.messages.rollout import SamplingParams

IGNORED = {
    "user", "request_id", "return_token_ids", "detokenize", "output_mode", "cache_salt", "service_tier", "store",
    "metadata", "safety_identifier", "prompt_cache_key", "stream_options", "routed_experts_prompt_start",
    "spaces_between_special_tokens", "add_special_tokens", "output_kind", "skip_clone", "skip_reading_prefix_cache",
}  # fmt: skip
"""Fields that change no token, and whose answer is the same here."""

NEUTRAL = {
    "best_of": (1,), "echo": (False,), "length_penalty": (1,), "use_beam_search": (False,), "suffix": ("",),
    "stream": (False,), "include_stop_str_in_output": (False,), "priority": (0,), "tools": ([],),
    "tool_choice": ("none", "auto"), "top_logprobs": (0, 1), "prompt_logprobs": (0,), "truncate_prompt_tokens": (-1,),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
    "parallel_tool_calls": (True, False), "skip_special_tokens": (True, False), "chat_template_kwargs": ({},),
    "thinking_token_budget": (-1,), "flat_logprobs": (False,),
}  # fmt: skip
"""Values that ask for nothing, besides null."""


def unknown_field(given: dict[str, Any]) -> str | None:
    """One line about the first field that is not honoured, or None."""
    for name, value in given.items():
        if name in IGNORED or value is None or value in NEUTRAL.get(name, ()):
            continue
        reason = REFUSED.get(name, "not honoured here; remove it")
        return f"{name}: {reason}"
    return None


class ResponseFormat(BaseModel):
    """OpenAI's form of an answer."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    def form(self) -> dict | None:
        """The form as StructuredOutputs has it. Raises ValueError if there is no schema."""
        if self.type == "json_schema":
            if not isinstance(schema := (self.json_schema or {}).get("schema"), dict):
                raise ValueError("response_format: json_schema.schema is not there; give one")
            return {"json": schema}
        return {"json_object": True} if self.type == "json_object" else None


class Sampled(BaseModel):
    """Sampling parameters of one request. `seed`: the index of the sample among those of its prompt, see `naming`."""

    model_config = ConfigDict(extra="allow")
    n: int = Field(1, ge=1, le=1_024)
    seed: int | None = Field(None, ge=0)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _honoured(self):
        if (reason := unknown_field(self.model_extra or {})) is not None:
            raise ValueError(reason)
        return self

    def sampling(self) -> SamplingParams:
        """Raises ValueError for values that no distribution has."""
        given = {name: getattr(self, name, None) for name in SamplingParams.model_fields}
        if self.response_format is not None:
            given["structured_outputs"] = self.response_format.form() or given["structured_outputs"]
        return SamplingParams(**{name: value for name, value in given.items() if value not in (None, "", [])})


class CompletionRequest(Sampled):
    """`/v1/completions`."""

    model: str | None = None
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def prompts(self) -> list[dict]:
        """The prompts as a PromptGroup takes them."""
        if not self.prompt:
            raise ValueError("prompt is empty; give one token or more")
        several = self.prompt if isinstance(self.prompt, list) and not _is_ids(self.prompt) else [self.prompt]
        return [{"text": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in several]


class TextPart(BaseModel):
    """A piece of a message's content; only text has a meaning here."""

    type: str
    text: str | None = None


class RequestedMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str
    content: str | list[TextPart]
    name: str | None = None

    def as_text(self) -> dict[str, str]:
        """Raises ValueError if its content is not text alone."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        if any(part.type != "text" or part.text is None for part in self.content):
            raise ValueError("messages: content of another type than text is not honoured here")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(Sampled):
    """`/v1/chat/completions`."""

    model: str | None = None
    messages: list[RequestedMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def prompts(self) -> list[dict]:
        return [{"messages": tuple(message.as_text() for message in self.messages)}]


class TokensSampled(Sampled):
    logprobs: int | None = Field(None, ge=0, le=1)


class TokensRequest(BaseModel):
    """`/inference/v1/generate`: token ids in and out."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    request_id: str | None = None
    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokensSampled = TokensSampled()
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _honoured(self):
        if (reason := unknown_field(self.model_extra or {})) is not None:
            raise ValueError(reason)
        return self


def _is_ids(prompt: list) -> bool:
    return bool(prompt) and all(isinstance(token, int) for token in prompt)
