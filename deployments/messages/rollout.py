"""Messages between driver and coordinator: pydantic models that are immutable and refuse unknown keys.

Token positions of a sample's answer begin at 0 with its first generated token. Made by drivers (requests) and by the
coordinator (results).
"""

from enum import StrEnum
from numbers import Integral
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tailrace.deployments.messages.refusals import refusal
from tailrace.policies.protocol.actions import SampleEnd


def _text_of_id(value: Any) -> Any:
    return str(int(value)) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _off(value: Any) -> Any:
    return 0 if isinstance(value, Integral) and value == -1 else value


Id = Annotated[str, BeforeValidator(_text_of_id), Field(min_length=1)]
"""A name chosen by the driver. An integer is taken too, and comes back as text."""


class Message(BaseModel):
    """Base of all messages: frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestMessage(Message):
    """A message made by drivers. Raises ValueError with a substitute for fields of other servers, see `refusals`.

    A message inside another one is checked again, since `model_copy` checks nothing.
    """

    model_config = ConfigDict(revalidate_instances="always")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if (reason := refusal(data, cls.model_fields)) is not None:
            raise ValueError(reason)
        return data


Request = TypeVar("Request", bound=RequestMessage)


class SamplingParams(RequestMessage):
    """Distribution that tokens are drawn from. The filters apply in the order min_p, top_k, top_p."""

    temperature: float = Field(1.0, ge=0.0, description="divisor of the logits; 0: greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="probability mass kept; 1: off")
    top_k: Annotated[int, BeforeValidator(_off)] = Field(0, ge=0, description="tokens kept; 0 or -1: off")
    min_p: float = Field(0.0, ge=0.0, le=1.0, description="smallest probability kept, relative to the largest; 0: off")
    stop_token_ids: tuple[int, ...] = Field((), description="tokens that end a sample, besides end-of-sequence")


class ChatMessage(Message):
    """One message of a chat prompt; the model's chat template joins them."""

    role: str = Field(min_length=1)
    content: str


class PromptGroup(RequestMessage):
    """One prompt and its number of samples. Exactly one of token_ids, text, messages is given."""

    prompt_id: Id = Field(description="unique within the batch; text, or an integer that comes back as text")
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    samples: int = Field(8, ge=1, description="samples of the prompt (G)")
    max_tokens: int = Field(256, ge=1, description="maximum new tokens of one sample, over all its chunks")
    sampling: SamplingParams = SamplingParams()
    forced_token_ids: tuple[tuple[int, ...], ...] | None = Field(
        None, description="replay: tokens that sample i emits; an end-of-sequence token follows the last"
    )

    @model_validator(mode="after")
    def _check(self):
        given = [name for name in ("token_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of token_ids, text, messages (given: {', '.join(given) or 'none'})")
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty; a prompt needs one token or more")
        if self.forced_token_ids is not None and len(self.forced_token_ids) != self.samples:
            raise ValueError(f"forced_token_ids has {len(self.forced_token_ids)} entries for {self.samples} samples")
        return self


MAX_SAMPLES = 1 << 18
"""Of one batch: the coordinator takes a second for a third of them."""


class BatchSettings(RequestMessage):
    """Settings of a batch or of an open session. `seed` and `step` enter every sample key."""

    batch_id: Id = Field(description="unique among running batches; text, or an integer that comes back as text")
    step: int = Field(0, ge=0)
    seed: int = Field(0, ge=0)
    priority: int = Field(0, description="higher goes first, strictly; among batches in flight")
    share: float = Field(1.0, gt=0.0, allow_inf_nan=False, description="of the service, relative to other batches")
    traceparent: str | None = Field(None, description="W3C traceparent of the driver's span")
    keep_trace: bool = Field(False, description="keep this batch's spans for `take_spans`")
    weights_version: int | None = Field(None, ge=0, description="refuse the batch under any other; null: any")
    min_weights_version: int = Field(0, ge=0, description="refuse the batch under a lower version; set by the client")


class RolloutBatch(BatchSettings):
    """Prompts of one step."""

    groups: tuple[PromptGroup, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _unique(self):
        ids = [group.prompt_id for group in self.groups]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(f"prompt_id {twice!r} is given twice")
        if (samples := sum(group.samples for group in self.groups)) > MAX_SAMPLES:
            raise ValueError(f"{samples} samples in one batch; at most {MAX_SAMPLES}, give several batches")
        return self


class Segment(Message):
    """Tokens [start, end) of a sample's answer, generated by one replica under one weights version.

    `weights_digest`: names the content of these weights, see `weights_digest` in deployments.vllm_exact.weight_loading.
    """

    weights_version: int
    weights_digest: str = ""
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


class SampleResult(Message):
    """One finished sample.

    `logprobs`: natural logarithms under the sampling distribution (after temperature and filters). `raw_logprobs`:
    under the model's own. Both have one value per token.
    """

    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    raw_logprobs: tuple[float, ...]
    finish_reason: SampleEnd
    error: str | None = None
    chunks: int = 0
    segments: tuple[Segment, ...] = ()
    timings: Timings = Timings()
    verifications: int = Field(0, description="engine steps that emitted tokens of the sample")
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_source: dict[str, int] = {}
    accepted_by_source: dict[str, int] = {}
    accepted_by_position: tuple[int, ...] = Field(
        (), description="element j: verifications that accepted more than j draft tokens"
    )
    close_calls: tuple[int, ...] = Field(
        (), description="positions whose two best candidates were closer than the engine's tolerance"
    )


class GroupResult(Message):
    """All samples of one prompt, in order of their indexes."""

    batch_id: str
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[SampleResult, ...]
    prompt_key: str = Field("", description="name of the prompt over epochs and runs, the key of its history")
    step: int = 0


class RejectedBy(StrEnum):
    """Cause of a refusal."""

    CONTENT = "content"  # the request itself: it will never be taken
    WEIGHTS = "weights"  # the service holds other weights than the batch asks for
    READER = "reader"  # another driver reads this batch
    QUOTA = "quota"  # a bound of the service: of this batch alone, or with those in flight


class Rejected(Message):
    """Refusal of a request. `reason`: one line with the prompt or key at fault and the remedy."""

    reason: str
    by: RejectedBy = RejectedBy.CONTENT


def checked(kind: type[Request], message: object) -> Request | Rejected:
    """A request as it came from a driver, if every value in it fits its field."""
    try:
        return kind.model_validate(message)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f".{part}" for part in first["loc"])
        return Rejected(reason=f"{kind.__name__}{place}: {first['msg'].removeprefix('Value error, ')}")


class WeightsLoaded(Message):
    """Completed update of the weights: these replicas hold the version. No replicas: those that start will load it.

    `digest`: names the content; empty if no replica has read it yet. `paused_s`: seconds without a token for it, by
    replica. `staged_s`: seconds in which the caller's tensors were copied; 0 for a folder.
    """

    version: int
    digest: str = ""
    replicas: tuple[str, ...]
    paused_s: dict[str, float] = {}
    staged_s: float = 0.0
