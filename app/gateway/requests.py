"""Requests of vLLM's routes, as far as they are honoured: any other field with a value that means something is refused.

Invariant: no field is ignored that could change a token. Source of names and defaults: vLLM 0.32,
`entrypoints/openai/{completion,chat_completion}/protocol.py`, `entrypoints/scale_out/token_in_token_out/protocol.py`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.refusals import REFUSED
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.messages.sampling import MAX_LOGPROBS
from tailrace.deployments.messages.session import STREAM_CHUNK_TOKENS

IGNORED = {
    "user", "request_id", "detokenize", "cache_salt", "service_tier", "store",
    "metadata", "safety_identifier", "prompt_cache_key", "routed_experts_prompt_start", "session_id", "mm_payload",
    "spaces_between_special_tokens", "output_kind", "skip_clone", "skip_reading_prefix_cache",
    "return_mm_kwargs", "return_token_offsets", "truncation_side",
}  # fmt: skip
"""Fields that change no token, and whose answer is the same here."""

NEUTRAL = {
    "best_of": (1,), "echo": (False,), "length_penalty": (1,), "use_beam_search": (False,), "suffix": ("",),
    "include_stop_str_in_output": (False,), "priority": (0,), "top_logprobs": (0, 1),
    "truncate_prompt_tokens": (-1,), "thinking_token_budget": (-1,),
    "flat_logprobs": (False,), "include_reasoning": (True, False), "watermarking": (False,), "documents": ([],),
    "skip_special_tokens": (True, False), "output_mode": ("tokens",), "return_prompt_text": (False,),
    "media_io_kwargs": ({},), "mm_processor_kwargs": ({},), "vllm_xargs": ({},),
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
    """OpenAI's form of an answer, or vLLM's structural tags, which have fields of their own."""

    model_config = ConfigDict(extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _known(self):
        if self.type != "structural_tag" and self.model_extra:
            raise ValueError(f"{min(self.model_extra)}: not honoured here; remove it")
        return self

    def form(self) -> dict | None:
        """The form as StructuredOutputs has it. Raises ValueError if there is no schema."""
        if self.type == "structural_tag":
            return {"structural_tag": self.model_dump(exclude_none=True)}
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
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_interval: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _honoured(self):
        if (reason := unknown_field(self.model_extra or {})) is not None:
            raise ValueError(reason)
        return self

    def sampling(self) -> SamplingParams:
        """Raises ValueError for values that no distribution has."""
        given = {name: getattr(self, name, None) for name in SamplingParams.model_fields}
        given |= {"structured_outputs": self.form(), "top_logprobs": self.likeliest()}
        return SamplingParams(**{name: value for name, value in given.items() if value not in (None, "", [])})

    def form(self) -> dict[str, Any] | None:
        """The form that the answer must have."""
        return self.structured_outputs

    def likeliest(self) -> int:
        """Number of tokens of each position whose logprobs are asked for, besides that of the sampled one."""
        asked = getattr(self, "logprobs", None) or 0
        return asked if asked > 1 else 0  # trainers send 1 for that of the sampled token


class StreamOptions(BaseModel):
    """`include_usage`: a last event with the tokens of all choices; `continuous_usage_stats`: in every event."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Streamable(BaseModel):
    """A request whose answer may be a stream."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _streamed(self):
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream; remove it or set stream")
        if self.stream and self.sampled().prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not with stream; remove one")
        return self

    def sampled(self) -> Sampled:
        """Its sampling parameters."""
        raise NotImplementedError

    def chunk_tokens(self) -> int | None:
        """Bound of an event of a stream; None if there is none."""
        return max(self.sampled().stream_interval or 0, STREAM_CHUNK_TOKENS) if self.stream else None

    def wants_usage(self, always: bool) -> bool:
        """Whether a stream's events have the usage: each of them (`always`), or the last."""
        options = self.stream_options or StreamOptions()
        return bool(options.continuous_usage_stats if always else options.include_usage)


class Answered(Sampled, Streamable):
    """Fields of completions and chats alike: how the answer is given."""

    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None

    def sampled(self) -> Sampled:
        return self

    def form(self) -> dict[str, Any] | None:
        asked = None if self.response_format is None else self.response_format.form()
        return asked or self.structured_outputs

    @model_validator(mode="after")
    def _fitting_stops(self):
        if self.stop and not self.skip_special_tokens:
            raise ValueError("skip_special_tokens: stop texts are looked for without special tokens; remove one")
        return self


class CompletionRequest(Answered):
    """`/v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    def prompts(self, tokenizer: Prompts) -> list[dict]:
        """The prompts as a PromptGroup takes them."""
        if not self.prompt:
            raise ValueError("prompt is empty; give one token or more")
        several = self.prompt if isinstance(self.prompt, list) and not _is_ids(self.prompt) else [self.prompt]
        if not self.add_special_tokens:
            several = [tokenizer.encode(one) if isinstance(one, str) else one for one in several]
        return [{"text": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in several]


class TokensSampled(Sampled):
    """`sampling_mask`: ours; vLLM gives the answer's field of that name to all requests, by a flag of the server."""

    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    sampling_mask: bool | None = None


class TokensRequest(Streamable):
    """`/inference/v1/generate`: token ids in and out."""

    model_config = ConfigDict(extra="allow")
    request_id: str | None = None
    token_ids: list[int] = Field(min_length=1)
    sampling_params: TokensSampled = TokensSampled()
    features: Features | None = None

    def prompt(self) -> dict:
        """The prompt as a PromptGroup takes it."""
        features = {} if self.features is None else {"features": self.features}
        return {"token_ids": tuple(self.token_ids)} | features

    def sampled(self) -> Sampled:
        return self.sampling_params

    @model_validator(mode="after")
    def _honoured(self):
        if (reason := unknown_field(self.model_extra or {})) is not None:
            raise ValueError(reason)
        return self


def _is_ids(prompt: list) -> bool:
    return bool(prompt) and all(isinstance(token, int) for token in prompt)
