"""What travels between driver, coordinator and engines: typed, and strict about unknown keys.

User-facing messages are pydantic models; the two that cross the wire once per chunk are slotted
dataclasses over numpy arrays. Token positions are absolute: 0 is the first token of the prompt.
"""

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.policies.protocol.actions import SampleEnd


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SamplingParams(Message):
    """How a token is drawn. temperature 0 is greedy; the filters apply in the order min_p, top_k, top_p."""

    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, description="0: off")
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    stop_token_ids: tuple[int, ...] = ()


class ChatMessage(Message):
    role: str = Field(min_length=1)
    content: str


class PromptGroup(Message):
    """One prompt and how many samples of it are wanted. Exactly one of token_ids, text, messages is given."""

    prompt_id: str = Field(min_length=1)
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    samples: int = Field(8, ge=1)
    max_tokens: int = Field(256, ge=1, description="most new tokens of one sample, over all its chunks")
    sampling: SamplingParams = SamplingParams()
    forced_token_ids: tuple[tuple[int, ...], ...] | None = Field(
        None, description="replay: the tokens sample i shall emit; an end-of-sequence token follows the last"
    )

    @model_validator(mode="after")
    def _check(self):
        given = [name for name in ("token_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of token_ids, text, messages (given: {', '.join(given) or 'none'})")
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty; a prompt needs at least one token")
        if self.forced_token_ids is not None and len(self.forced_token_ids) != self.samples:
            raise ValueError(f"forced_token_ids has {len(self.forced_token_ids)} entries for {self.samples} samples")
        return self


class RolloutBatch(Message):
    """One step's prompts. `seed` and `step` enter every sample key."""

    batch_id: str = Field(min_length=1)
    groups: tuple[PromptGroup, ...] = Field(min_length=1)
    step: int = Field(0, ge=0)
    seed: int = Field(0, ge=0)
    traceparent: str | None = None
    keep_trace: bool = Field(False, description="keep this batch's spans for `take_spans`")

    @model_validator(mode="after")
    def _unique(self):
        ids = [group.prompt_id for group in self.groups]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ValueError(f"prompt_id {twice!r} is given twice")
        return self


class Segment(Message):
    """Tokens [start, end) of a sample's answer, made by one replica under one weights version."""

    weights_version: int
    replica_id: str
    start: int
    end: int


class Timings(Message):
    """Seconds since the batch was submitted (`started_s`, `finished_s`) and spent per kind of work."""

    started_s: float = 0.0
    finished_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class SampleResult(Message):
    """One finished sample. `logprobs` are under the sampling distribution, `raw_logprobs` under the model's own."""

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
    verifications: int = 0  # engine steps that made tokens of it
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_source: dict[str, int] = {}
    accepted_by_source: dict[str, int] = {}
    accepted_by_position: tuple[int, ...] = ()  # verifications that accepted more than that many draft tokens


class GroupResult(Message):
    batch_id: str
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    samples: tuple[SampleResult, ...]
    prompt_key: str = ""  # names the prompt over epochs and runs; its history is kept under it
    step: int = 0


class Rejected(Message):
    """The batch was not taken; `reason` is one line that names the prompt or key and how to mend it."""

    reason: str


class WeightsLoaded(Message):
    """An update of the weights is done: these replicas hold the version."""

    version: int
    replicas: tuple[str, ...]
