"""Sampling parameters: a sample's distribution and its end. Names: vllm.sampling_params.

Invariant: each is a function of the sample's own tokens, so tokens stay independent of chunks, moves and drafts.
"""

import json
from collections.abc import Mapping
from numbers import Integral
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from tailrace.deployments.messages.message import RequestMessage, Text

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_LOGPROBS = 128
"""Maximum number of logprobs of one position."""

MAX_MASK_TOKENS = 512
"""Maximum number of mask tokens of one position, ties at the edge excepted: trainers with masks use a top_k of up to a
few hundred, and keep 8 tokens on average (prime-rl's pull request 3431).
"""
MAX_INT32 = 2**31 - 1
"""Maximum of counts, which samplers hold in 32 bits."""

MAX_TEMPERATURE = 100.0
"""Maximum temperature, far beyond use: there the logits of a vocabulary of 2^20 tokens differ by less than a hundredth
of their noise.
"""

MIN_REPETITION_PENALTY = 0.01
"""Minimum repetition penalty: smaller ones turn logits into infinities."""

Bias = Annotated[FiniteFloat, Field(ge=-100.0, le=100.0)]
Token = Annotated[int, Field(ge=0)]


def _off(value: Any) -> Any:
    """Returns 0 for the values of top_k that vLLM reads as "no filter": -1, and more than any vocabulary has."""
    return 0 if isinstance(value, Integral) and (value == -1 or value > MAX_INT32) else value


def _pairs(value: Any) -> Any:
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_json(value: Any) -> Any:
    try:
        return json.dumps(value) if isinstance(value, Mapping) else value
    except RecursionError as error:
        raise ValueError("nested too deep") from error


class StructuredOutputs(RequestMessage):
    """Form of an answer; exactly one field is given. Enforced by vLLM's xgrammar backend."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)
    json_schema: Annotated[Text, BeforeValidator(_as_json)] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: tuple[Text, ...] | None = None
    grammar: Text | None = Field(None, description="in EBNF")
    structural_tag: Annotated[Text, BeforeValidator(_as_json)] | None = Field(None, description="xgrammar's, in JSON")

    @model_validator(mode="after")
    def _one(self):
        given = [name for name, value in self if value]
        if len(given) != 1:
            names = "json, json_object, regex, choice, grammar, structural_tag"
            raise ValueError(f"give exactly one of {names} (given: {len(given)})")
        return self


class SamplingParams(RequestMessage):
    """Distribution that tokens are drawn from, and ends of a sample besides `max_tokens`.

    Logits are changed in vLLM's order: form of the answer, allowed_token_ids, bad_words, min_tokens, logit_bias,
    penalties; then temperature and the filters min_p, top_k, top_p.
    """

    temperature: float = Field(1.0, ge=0.0, le=MAX_TEMPERATURE, description="divisor of the logits; 0: greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="probability mass kept; 1: off")
    top_k: Annotated[int, BeforeValidator(_off)] = Field(
        0, ge=0, description="tokens kept; 0, -1 or more than the vocabulary: off"
    )
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="smallest probability kept, relative to the largest; 0: off")
    stop_token_ids: tuple[Token, ...] = Field((), description="tokens that end a sample, besides end-of-sequence")
    stop: Annotated[tuple[Text, ...], BeforeValidator(_several)] = Field(
        (), max_length=MAX_STOPS, description="texts that end a sample; `SampleResult.text` ends before them"
    )
    ignore_eos: bool = Field(False, description="an end-of-sequence token does not end the sample")
    min_tokens: int = Field(0, ge=0, le=MAX_INT32, description="tokens before which nothing ends the sample")
    bad_words: Annotated[tuple[Text, ...], BeforeValidator(_several)] = Field((), description="texts that are not made")
    allowed_token_ids: tuple[Token, ...] | None = Field(None, min_length=1, description="no other token is drawn")
    logit_bias: Annotated[tuple[tuple[Token, Bias], ...], BeforeValidator(_pairs)] = Field(
        (), description="added to the logits of these tokens"
    )
    repetition_penalty: float = Field(
        1.0, ge=MIN_REPETITION_PENALTY, le=100.0, description="positive logits of tokens that came are divided"
    )
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="taken off logits of the answer's tokens")
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, description="the same, for each time that they came")
    structured_outputs: StructuredOutputs | None = None
    top_logprobs: int = Field(
        0, ge=0, le=MAX_LOGPROBS, description="likeliest tokens whose logprobs come with each token; in open sessions"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="the same for the prompt's tokens; 0: their own logprobs alone"
    )

    sampling_mask: bool = Field(
        False, description="ids of the tokens that the filters keep come with each token; needs top_k; in open sessions"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.sampling_mask and not (1 <= self.top_k <= MAX_MASK_TOKENS and self.temperature > 0):
            raise ValueError(f"sampling_mask: give a top_k of 1 to {MAX_MASK_TOKENS}, and a temperature above 0")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in self.stop):
            raise ValueError(f"stop: a text of 1 to {MAX_STOP_CHARACTERS} characters each")
        if any(not word.strip() for word in self.bad_words):
            raise ValueError("bad_words: an empty text")
        if self.structured_outputs is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError("structured_outputs: the form ends the answer; remove ignore_eos and min_tokens")
        return self

    @property
    def wants_more(self) -> bool:
        """True if more is requested for a position than its token and that token's logprobs."""
        return self.top_logprobs > 0 or self.prompt_logprobs is not None or self.sampling_mask

    @property
    def changes_logits(self) -> bool:
        """True if a logit may differ from the model's own, before the filters."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        bans = self.bad_words or self.min_tokens or self.allowed_token_ids is not None
        return bool(penalties or bans or self.logit_bias or self.structured_outputs is not None)
