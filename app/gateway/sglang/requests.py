"""Requests of SGLang's `/generate`: the fields that are honoured, and those that have no effect. Others are refused.

Source of names and defaults: SGLang 0.5.23, `srt/managers/io_struct.py` (GenerateReqInput) and
`srt/sampling/sampling_params.py`.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from tailrace.app.gateway.edge.fields import Ids, Listed, Texts
from tailrace.app.gateway.edge.honoured import HonouredFields
from tailrace.app.gateway.requests import INT64, biases
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.messages.sampling import MAX_LOGPROBS
from tailrace.deployments.messages.session import STREAM_CHUNK_TOKENS

IGNORED = {
    "session_id", "log_metrics", "return_text_in_logprobs", "modalities", "routed_dp_rank", "data_parallel_rank",
    "disagg_prefill_dp_rank", "routing_key", "conversation_id", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "decode_tp_size", "priority", "extra_key", "no_logs", "custom_labels",
    "external_trace_header", "received_time", "return_bytes", "background", "use_audio_in_video", "cache_salt",
    "kv_hints", "spaces_between_special_tokens", "stream_interval",
}  # fmt: skip
"""Fields that change no token, and without which the answer is the same here."""

OFF = (None, False, [], {}, "", 0)
"""Values that ask for nothing, of any field that is not honoured."""

FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""Forms of an answer, by the name that StructuredOutputs has."""

SAME = (
    "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "ignore_eos", "logit_bias",
)  # fmt: skip
"""Sampling parameters of SamplingParams' own names."""


class SglangFields(HonouredFields):
    """An object of a request. Any field that it does not declare has no effect, or is refused."""

    ignored: ClassVar[Collection[str]] = IGNORED
    neutral: ClassVar[Mapping[str, Collection]] = {}
    off: ClassVar[Collection] = OFF
    instead: ClassVar[Mapping[str, str]] = {
        "image_data": "images come processed, as features of /inference/v1/generate",
        "input_embeds": "prompts are texts or token ids",
        "custom_logit_processor": "it is pickled code, and none is run; give allowed_token_ids or a form of the answer",
        "stop_regex": "give stop, texts",
        "return_sampling_mask": "give sampling_mask to /inference/v1/generate",
    }


class SglangSampling(SglangFields):
    """`sampling_params`. `max_new_tokens`: null for as many as the context has room for. `sampling_seed`: the index of
    the sample among those of its prompt, see `naming`.
    """

    max_new_tokens: int = Field(128, ge=0)
    n: int = Field(1, ge=1, le=1_024)
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(biases)] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    sampling_seed: int | None = Field(None, ge=-INT64, lt=INT64)
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @model_validator(mode="before")
    @classmethod
    def _unbounded(cls, given: Any) -> Any:
        """Replaces null by 0 for `max_new_tokens`: null is not the default of 128; and refuses a given 0."""
        if not isinstance(given, dict) or "max_new_tokens" not in given:
            return given
        if given["max_new_tokens"] == 0:
            raise ValueError("max_new_tokens: 0 makes no token; give 1 or more")
        return given | {"max_new_tokens": given["max_new_tokens"] or 0}

    @property
    def bound(self) -> int | None:
        return self.max_new_tokens or None

    def params(self, prompt_logprobs: bool, top_logprobs: int) -> SamplingParams:
        """Returns the sampling parameters. Raises ValueError for invalid values."""
        given = {name: getattr(self, name) for name in SAME}
        forms = {to: getattr(self, name) for name, to in FORMS.items() if getattr(self, name)}
        given |= {"min_tokens": self.min_new_tokens, "structured_outputs": forms or None}
        given |= {"top_logprobs": top_logprobs, "prompt_logprobs": 0 if prompt_logprobs else None}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class GenerateRequest(SglangFields):
    """`/generate`: one prompt, or several with the same parameters. `logprob_start_len`: the prompt's token from which
    on its logprobs are returned; -1 for none.
    """

    rid: str | Texts | None = None
    text: str | Texts | None = None
    input_ids: Annotated[Ids | Annotated[list[Ids], Listed], Field(union_mode="left_to_right")] | None = None
    sampling_params: SglangSampling = SglangSampling()
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1)
    top_logprobs_num: int = Field(0, ge=0, le=MAX_LOGPROBS)
    return_routed_experts: bool = False
    routed_experts_start_len: int = Field(0, ge=0)
    return_prompt_token_ids: bool = False
    stream: bool = False
    lora_path: str | None = None

    @model_validator(mode="after")
    def _one_form(self):
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("input_ids: give a prompt, by either input_ids or text")
        if not (self.input_ids if self.text is None else self.text):
            raise ValueError("input_ids: the prompt is empty")
        if self.stream and self.logprob_start_len >= 0:
            raise ValueError("logprob_start_len: not with stream; remove one")
        if isinstance(self.rid, list) and len(self.rid) != len(self._several()):
            raise ValueError(f"rid: {len(self.rid)} ids for {len(self._several())} prompts")
        return self

    @property
    def is_single(self) -> bool:
        """Returns whether the answer is one object: one prompt, not in a list, and one sample."""
        given = self.input_ids if self.text is None else self.text
        return (isinstance(given, str) or isinstance(given[0], int)) and self.sampling_params.n == 1

    def _several(self) -> list:
        given = self.input_ids if self.text is None else self.text
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    def prompts(self) -> list[dict]:
        """Returns the prompts in the format of a PromptGroup."""
        return [{"text": one} if isinstance(one, str) else {"token_ids": tuple(one)} for one in self._several()]

    def chunk_tokens(self) -> int | None:
        """Returns the maximum tokens of an event of a stream; None if there is none."""
        return STREAM_CHUNK_TOKENS if self.stream else None

    def wants_usage(self, always: bool) -> bool:
        """Returns whether a stream's events have vLLM's usage: never, `meta_info` has the counts."""
        return False

    def id_of(self, prompt: int, sample: int) -> str | None:
        """Returns the id that the request gives to a sample; None if it gives none."""
        rid = self.rid[prompt] if isinstance(self.rid, list) else self.rid
        if rid is None or self.is_single:
            return rid
        return f"{rid}_{sample}" if isinstance(self.rid, list) else f"{rid}_{prompt}_{sample}"

    def sampling(self) -> SamplingParams:
        """Returns the sampling parameters. Raises ValueError for invalid values."""
        wanted = self.return_logprob
        return self.sampling_params.params(wanted and self.logprob_start_len >= 0, self.top_logprobs_num * wanted)
