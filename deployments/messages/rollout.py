"""Messages between driver and coordinator: prompts in, samples out.

Token positions of a sample's answer begin at 0 with its first generated token. Made by drivers (requests) and by the
coordinator (results).
"""

from enum import StrEnum
from numbers import Integral
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tailrace.deployments.features.wire import Features
from tailrace.deployments.messages.message import MAX_NUMBER, Message, Name, RequestMessage, Text, first_line
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.deployments.results.columns import Column, LogprobColumn, TokenColumn, repeated
from tailrace.deployments.results.later_text import LaterText
from tailrace.deployments.results.routed_experts import RoutedExperts
from tailrace.policies.protocol.actions import SampleEnd


def _text_of_id(value: Any) -> Any:
    return str(int(value)) if isinstance(value, Integral) and not isinstance(value, bool) else value


Id = Annotated[Name, BeforeValidator(_text_of_id)]
"""A name chosen by the driver. An integer is accepted too, and comes back as text."""


Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]

Request = TypeVar("Request", bound=RequestMessage)


class ChatMessage(Message):
    """One message of a chat prompt; the model's chat template joins them."""

    role: Name
    content: Text


class LengthPrediction(RequestMessage):
    """A prediction for the answers to one prompt, by the driver's own predictor."""

    number: float = Field(allow_inf_nan=False, description="greater where longer answers are expected, on any scale")
    quality: float = Field(ge=0.0, le=1.0, description="rank correlation of the batch's predictions with its lengths")


class PromptGroup(RequestMessage):
    """One prompt and its number of samples. Exactly one of token_ids, text, messages is given.

    `features`: features of a prompt given as token_ids, which hold their placeholders.
    """

    prompt_id: Id = Field(description="unique within the batch; text, or an integer that comes back as text")
    token_ids: tuple[int, ...] | None = None
    text: Text | None = None
    messages: tuple[ChatMessage, ...] | None = None
    samples: int = Field(8, ge=1, description="samples of the prompt (G)")
    max_tokens: int = Field(256, ge=1, description="maximum new tokens of one sample, over all its chunks")
    sampling: SamplingParams = SamplingParams()
    adapter: Name | None = Field(None, description="adapter of LoRA by its loaded name; null: the model alone")
    forced_token_ids: tuple[tuple[int, ...], ...] | None = Field(
        None, description="replay: tokens that sample i emits; an end-of-sequence token follows the last"
    )
    features: Features | None = Field(None, description="processed images, videos and sounds, in vLLM's form")
    prediction: LengthPrediction | None = Field(None, description="of the answers' length, for `lanes`")

    @model_validator(mode="after")
    def _check(self):
        given = [name for name in ("token_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of token_ids, text, messages (given: {', '.join(given) or 'none'})")
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty; a prompt needs one token or more")
        if self.forced_token_ids is not None and len(self.forced_token_ids) != self.samples:
            raise ValueError(f"forced_token_ids has {len(self.forced_token_ids)} entries for {self.samples} samples")
        if self.forced_token_ids is not None and (self.sampling.stop or self.sampling.ignore_eos):
            raise ValueError("forced_token_ids: a replay ends after its tokens; remove stop and ignore_eos")
        if self.features is not None and self.token_ids is None:
            raise ValueError("features: give the prompt as token_ids, in which their placeholders are")
        if self.features is not None and self.features.end > len(self.token_ids):
            end, count = self.features.end, len(self.token_ids)
            raise ValueError(f"features: a placeholder ends at {end}, the prompt has {count} tokens")
        if self.sampling.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.sampling.min_tokens}, max_tokens {self.max_tokens}")
        return self


MAX_SAMPLES = 1 << 18
"""Maximum number of samples of one batch: the coordinator takes a second for a third of them."""


class BatchSettings(RequestMessage):
    """Settings of a batch or of an open session. `seed` and `step` enter every sample key."""

    batch_id: Id = Field(description="unique among running batches; text, or an integer that comes back as text")
    step: Number = 0
    seed: Number = 0
    priority: int = Field(
        0, ge=-MAX_NUMBER, le=MAX_NUMBER, description="higher goes first, strictly; among batches in flight"
    )
    share: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="of the service, relative to other batches")
    traceparent: Text | None = Field(None, description="W3C traceparent of the driver's span")
    keep_trace: bool = Field(False, description="keep this batch's spans for `take_spans`")
    weights_version: Number | None = Field(None, description="refuse the batch under any other; null: any")
    min_weights_version: Number = Field(0, description="refuse the batch under a lower version; set by the client")
    min_adapter_versions: dict[Text, Number] = Field({}, description="the same of adapters, by name; set by the client")

    @property
    def lowest_weights(self) -> int:
        """The lowest weights version that it may run under."""
        return max(self.min_weights_version, self.weights_version or 0)


class RolloutBatch(BatchSettings):
    """Prompts of one step."""

    groups: tuple[PromptGroup, ...] = Field(min_length=1)

    @property
    def adapters(self) -> set[str]:
        """Names of the adapters that it uses."""
        return {group.adapter for group in self.groups} - {None}

    @model_validator(mode="after")
    def _unique(self):
        ids = [group.prompt_id for group in self.groups]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(f"prompt_id {twice!r} is given twice")
        if (asking := next((one.prompt_id for one in self.groups if one.sampling.wants_more), None)) is not None:
            raise ValueError(
                f"prompt {asking!r}: top_logprobs, prompt_logprobs and sampling_mask come in open sessions alone"
            )
        if (samples := sum(group.samples for group in self.groups)) > MAX_SAMPLES:
            raise ValueError(f"{samples} samples in one batch; at most {MAX_SAMPLES}, give several batches")
        return self


Top = tuple[tuple[int, float], ...]
"""The likeliest tokens of one position and their logprobs, by falling logprob. -inf means that the filters drop the
token.
"""


Mask = tuple[int, ...]
"""The tokens of one position that could be drawn, after rules and filters, by rising id; ties at the edge included."""


class PromptLogprobs(Message):
    """Logprobs of a prompt's tokens from the second on, under the model's own distribution. `ranks`: the likeliest has
    1.
    """

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top: tuple[Top, ...] = ()


class Segment(Message):
    """Tokens [start, end) of a sample's answer, generated by one replica under one weights version.

    `weights_digest`: names the content of these weights, see `weights_digest` in deployments.vllm_exact.weight_loading.
    `adapter_digest`: the same for the group's adapter; empty without one.
    """

    weights_version: int
    weights_digest: str = ""
    adapter_digest: str = ""
    replica_id: str
    start: int
    end: int


class Timings(Message):
    """Seconds from the batch's submission to the sample's first chunk and to its end; seconds spent by kind of work."""

    started_s: float = 0.0
    finished_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class SampleResult(LaterText, Message):
    """One finished sample.

    `logprobs`: natural logarithms under the sampling distribution (after temperature and filters). `raw_logprobs`:
    those under the model's own. Both have one value per token. `text`: decoded on first use for samples of a batch.
    """

    sample_index: int
    token_ids: TokenColumn
    text: str
    logprobs: LogprobColumn
    raw_logprobs: LogprobColumn
    finish_reason: SampleEnd
    stop_reason: int | str | None = Field(None, description="the stop text or stop token id that ended it")
    error: str | None = None
    chunks: int = 0
    cached_tokens: int = Field(0, description="context tokens whose KV was found, over its chunks")
    computed_tokens: int = Field(
        0, description="context tokens whose KV was computed, over its chunks; prompt included"
    )
    segments: tuple[Segment, ...] = ()
    timings: Timings = Timings()
    verifications: int = Field(0, description="engine steps that emitted tokens of the sample")
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_source: dict[str, int] = Field(default_factory=dict)
    accepted_by_source: dict[str, int] = Field(default_factory=dict)
    accepted_by_position: tuple[int, ...] = Field(
        (), description="element j: verifications that accepted more than j draft tokens"
    )
    top_logprobs: tuple[Top, ...] = Field((), description="of each token's position, if asked for, as `logprobs` are")
    sampling_mask: tuple[Mask, ...] = Field((), description="of each token's position, if asked for")
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: RoutedExperts | None = Field(
        None, description="of all tokens but the last, the prompt's included, if the engine keeps them"
    )
    close_calls: tuple[int, ...] = Field(
        (), description="positions whose two best candidates were closer than the engine's tolerance"
    )

    @property
    def versions(self) -> Column:
        """The weights version of each token, int32."""
        counts = [one.end - one.start for one in self.segments]
        return repeated([one.weights_version for one in self.segments], counts)


class GroupResult(Message):
    """All samples of one prompt, in order of their indexes."""

    batch_id: str
    prompt_id: str
    prompt_token_ids: TokenColumn
    samples: tuple[SampleResult, ...]
    prompt_key: str = Field("", description="name of the prompt over epochs and runs, the key of its history")
    step: int = 0


class RejectedBy(StrEnum):
    """Cause of a refusal."""

    ROLE = "role"  # the driver's role has no right to the call
    CONTENT = "content"  # the request itself: it will never be accepted
    WEIGHTS = "weights"  # the service holds other weights than the batch requires
    ADAPTER = "adapter"  # no adapter of the name is loaded
    READER = "reader"  # another driver reads this batch
    QUOTA = "quota"  # a limit of the service, with the batches in flight
    DATA = "data"  # an image without its data, which the service has not: it is accepted with them
    SIZE = "size"  # a limit of the service, by itself: it will never be accepted under these quotas


class Rejected(Message):
    """Refusal of a request. `reason`: one line with the prompt or key at fault and the remedy."""

    reason: str
    by: RejectedBy = RejectedBy.CONTENT


def checked(kind: type[Request], message: object) -> Request | Rejected:
    """Returns the validated request of a driver, or Rejected if a value does not fit its field."""
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        return Rejected(reason=first_line(kind.__name__, error))


class WeightsLoaded(Message):
    """A completed update of the weights: these replicas hold the version. Without replicas, those that start later will
    load it.

    `digest`: names the content; empty if no replica has read it yet. `paused_s`: seconds without a token for the
    update, by replica. `staged_s`: seconds in which the caller's tensors were copied; 0 for a folder. `scores`: the
    score of each replica's weights, see `deployments.messages.scores`. `set_aside`: replicas that hold the version and
    are not used, each with the reason. `warnings`: what else the scores have shown, by replica.
    """

    version: int
    digest: str = ""
    replicas: tuple[str, ...]
    paused_s: dict[str, float] = Field(default_factory=dict)
    staged_s: float = 0.0
    scores: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    set_aside: dict[str, str] = Field(default_factory=dict)
    warnings: dict[str, str] = Field(default_factory=dict)


class WeightsCheck(Message):
    """The weights that every replica computes with, read back from its model.

    `checksums`: checksums of the first replica's values by saved name, see `deployments.staging.checksums`. `unlike`:
    by replica, the tensors that differ from the source of the weights or from the first replica; empty for a sound
    service. `problems`: by replica, why it could not compare with the source.
    """

    version: int
    digest: str
    replicas: tuple[str, ...]
    checksums: dict[str, str]
    unlike: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    problems: dict[str, str] = Field(default_factory=dict)
