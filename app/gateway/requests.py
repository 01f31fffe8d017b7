"""Requests of vLLM's routes: the fields that are honoured, with their limits. `edge/honoured.py` has the others.

Source of names and defaults: vLLM 0.32, see there.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from tailrace.app.gateway.edge.errors import FieldRefused
from tailrace.app.gateway.edge.fields import Ids, Listed, RequestObject, Texts
from tailrace.app.gateway.edge.forms import RequestedForm, ResponseFormat
from tailrace.app.gateway.edge.honoured import INSTEAD, HonouredFields
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.messages.sampling import MAX_LOGPROBS
from tailrace.deployments.messages.session import STREAM_CHUNK_TOKENS

MAX_BIAS = 100.0
"""Maximum bias; vLLM cuts a greater one to it."""

MAX_NAMED = 8
"""Maximum number of faults of one field that a refusal names."""

INT64 = 2**63


def biases(given: Any) -> Any:
    """Returns `logit_bias` by token id, cut as vLLM does. Raises ValueError that names the first invalid keys and
    values.
    """
    if not isinstance(given, Mapping):
        return given
    found, wrong = {}, []
    for token, bias in given.items():
        try:
            found[int(token)] = min(MAX_BIAS, max(-MAX_BIAS, float(bias)))
        except (ValueError, TypeError, OverflowError):
            wrong.append(f"{str(token)[:30]!r}: {str(bias)[:30]!r}")
    if wrong:
        are = "is not a token id and a number" if len(wrong) == 1 else "are not token ids and numbers"
        raise ValueError(f"{', '.join(wrong[:MAX_NAMED])} {are}")
    return found


class Sampled(HonouredFields):
    """Sampling parameters of one request. `seed`: the index of the sample among those of its prompt, see `naming`; -1
    means none, as in vLLM.
    """

    n: int = Field(1, ge=1, le=1_024)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: Ids | None = None
    stop: str | Texts | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(biases)] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    structured_outputs: RequestedForm | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream_interval: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, given: Any) -> Any:
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(given, dict) and isinstance(given.get(name), str):
                raise FieldRefused(f"`{name}` must be an integer.", name)
        return given

    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters. Raises ValueError for invalid values."""
        given = {name: getattr(self, name, None) for name in SamplingParams.model_fields}
        given |= {"structured_outputs": self.form(), "top_logprobs": self.likeliest()}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def form(self) -> dict[str, Any] | None:
        """Returns the form that the answer must have."""
        return None if self.structured_outputs is None else self.structured_outputs.form()

    def likeliest(self) -> int:
        """Returns the number of tokens of each position whose logprobs are requested, besides that of the sampled
        one.
        """
        asked = getattr(self, "logprobs", None) or 0
        return asked if asked > 1 else 0  # trainers send 1 for that of the sampled token


class StreamOptions(RequestObject):
    """`include_usage`: a last event has the tokens of all choices; `continuous_usage_stats`: with it, every event has
    them.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Streamable(HonouredFields):
    """A request whose answer may be a stream."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _streamed(self):
        if self.stream and self.sampled().prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not with stream; remove one")
        return self

    def sampled(self) -> Sampled:
        """Returns its sampling parameters."""
        raise NotImplementedError

    def chunk_tokens(self) -> int | None:
        """Returns the maximum tokens of an event of a stream; None if there is none."""
        return max(self.sampled().stream_interval or 0, STREAM_CHUNK_TOKENS) if self.stream else None

    def wants_usage(self, always: bool) -> bool:
        """Returns whether a stream's events have the usage: each of them (`always`), or the last."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage and (options.continuous_usage_stats or not always))


class Answered(Sampled, Streamable):
    """Fields that completions and chats share: the format of the answer."""

    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    response_format: ResponseFormat | None = None

    def sampled(self) -> Sampled:
        return self

    def form(self) -> dict[str, Any] | None:
        asked = None if self.response_format is None else self.response_format.form()
        return asked or super().form()

    @model_validator(mode="before")
    @classmethod
    def _stream_options_of_a_stream(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("stream_options") and not given.get("stream"):
            raise FieldRefused("Stream options can only be defined when `stream=True`.", "stream_options")
        return given

    @model_validator(mode="after")
    def _fitting_stops(self):
        if self.stop and not self.skip_special_tokens:
            raise ValueError("skip_special_tokens: stop texts are looked for without special tokens; remove one")
        return self


class CompletionRequest(Answered):
    """`/v1/completions`."""

    prompt: Annotated[str | Texts | Ids | Annotated[list[Ids], Listed], Field(union_mode="left_to_right")]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _some_prompt(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("prompt") in (None, "", []):
            raise FieldRefused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        return given

    def prompts(self, tokenizer: Prompts) -> list[dict]:
        """Returns the prompts in the format of a PromptGroup."""
        several = self.prompt if isinstance(self.prompt, list) and not _is_ids(self.prompt) else [self.prompt]
        if not self.add_special_tokens:
            several = [tokenizer.encode(one) if isinstance(one, str) else one for one in several]
        return [{"text": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in several]


class TokensSampled(Sampled):
    """`max_tokens`: None for as many as the context has room for, as in vLLM. `sampling_mask`: ours; vLLM adds the
    answer's field of that name to all requests, by a flag of the server.
    """

    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    sampling_mask: bool | None = None


class TokensRequest(Streamable):
    """`/inference/v1/generate`: token ids in and out."""

    instead = INSTEAD | dict.fromkeys(TokensSampled.model_fields, "give it in sampling_params")
    request_id: str | None = None
    token_ids: Annotated[list[int], Field(fail_fast=True, min_length=1)]
    sampling_params: TokensSampled = TokensSampled()
    features: Features | None = None

    def prompt(self) -> dict:
        """Returns the prompt in the format of a PromptGroup."""
        features = {} if self.features is None else {"features": self.features}
        return {"token_ids": tuple(self.token_ids)} | features

    def sampled(self) -> Sampled:
        return self.sampling_params


def _is_ids(prompt: list) -> bool:
    return bool(prompt) and all(isinstance(token, int) for token in prompt)
