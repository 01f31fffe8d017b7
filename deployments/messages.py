"""What travels between driver, coordinator and engines: typed, and strict about unknown keys.

User-facing messages are pydantic models; the two that cross the wire once per chunk are slotted
dataclasses over numpy arrays. Token positions are absolute: 0 is the first token of the prompt.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.context.plan import DraftPlan, DraftReport
from policies.actions import SampleEnd
from policies.events import ChunkEnd


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


class ReplicaStatus(Message):
    replica_id: str
    ready: bool
    running: int
    max_running: int
    kv_used_share: float
    weights_version: int
    preemptions: int
    work: dict[str, int] = {}  # see EngineStats
    closing: bool = False  # it is to be given back, and takes no new chunks
    step_cost: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # see EngineStats


class ReplicasChanged(Message):
    """So many engine replicas are up and so many are wanted, since `at_s` (unix seconds); what is beyond the wanted
    ones goes, and its resources are then free for Ray."""

    replicas: int
    wanted: int
    reason: str
    at_s: float


class BatchStatus(Message):
    """`tokens` counts whole chunks and what running chunks had made when last looked at, `observed_s` ago."""

    batch_id: str
    samples: int
    ended: int
    groups: int
    emitted: int
    tokens: int
    tail: bool  # whether 90 % of the samples have ended
    seconds: float


class PoolView(Message):
    """The KV pool: its own figures (see kvpool.status.PoolStatus; None: it is down), and what was counted on the way.

    Counts are by WHAT.CAUSE, over all replicas: tokens by where their KV came from (`local_tokens`, `pool_tokens`,
    `recomputed_tokens.CAUSE`), bytes, failures, and operations by duration (`load_ms.N`: at most N milliseconds).
    """

    status: dict[str, Any] | None
    token_bytes: int
    counts: dict[str, int]
    problem: str | None = None  # why the last question to the pool's master got no answer
    problems: dict[str, str] = {}  # replicas that had to start without the pool, and why
    keys_by_version: dict[int, int] | None = None  # only where it was asked for


class ServiceStatus(Message):
    waiting: int
    running: int
    batches: tuple[BatchStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    observed_s: float  # age of the oldest replica report used
    waits_for: str | None  # what holds everything up, if anything does
    policies: dict[str, Any]
    weights_version: int = 0
    pool: PoolView | None = None  # None: the service has none
    context: dict[str, int] | None = None  # what was told to the group context and asked of it; None: there is none


SampleKey = Annotated[int, "unsigned, 64 bits"]


def sample_key(seed: int, step: int, prompt_id: str, sample_index: int) -> SampleKey:
    """The 64-bit key of a sample's noise: blake2b over (run seed, step, prompt id, sample index)."""
    text = f"{seed}\0{step}\0{prompt_id}\0{sample_index}".encode()
    return int.from_bytes(blake2b(text, digest_size=8, person=b"tailrace-sample").digest(), "little")


@dataclass(frozen=True, slots=True)
class KvPlan:
    """What to do with a chunk's KV. `min_pull_tokens`: least gain over the local cache worth a pull; None: no pull."""

    version: int
    min_pull_tokens: int | None = 1
    save: bool = True  # at its end, for whoever goes on with the sample


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Generate at most `max_tokens` tokens after `token_ids` (int32: prompt, then what was generated so far)."""

    chunk_id: str
    sample_key: SampleKey
    token_ids: np.ndarray
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    weights_version: int
    kv: KvPlan | None = None  # None: a replica without a pool
    draft: DraftPlan | None = None  # None: nothing is drafted for it
    forced: np.ndarray | None = None  # int32, the whole answer to replay; index 0 is position `prompt_tokens`
    traceparent: str | None = None
    keep_trace: bool = False


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """New tokens of one chunk (int32) and their logprobs (float32), all of one length; how it ended."""

    chunk_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray
    end: ChunkEnd
    weights_version: int
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int  # context tokens whose KV was found
    computed_tokens: int  # context tokens that were prefilled again
    pulled_tokens: int = 0  # of the cached ones, from the pool
    stored_tokens: int = 0  # of the context at the end, that this chunk has put into the pool or found there
    kv_names: bytes = b""  # names of the context's full blocks, `kvpool.keys.NAME_BYTES` each
    recompute_cause: str = ""  # why computed_tokens were not found; see kvpool.scheduler
    verifications: int = 0  # engine steps that made tokens of it
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: DraftReport | None = None  # None: it had no plan


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of one replica. Capacities never change; the rest is as of `observed_at` (unix seconds)."""

    replica_id: str
    weights_version: int
    block_tokens: int
    kv_capacity_blocks: int
    max_running: int
    max_model_len: int
    draft_tokens: int  # look-ahead slots a running chunk may need beyond its own tokens
    observed_at: float
    weights_source: str = ""  # the folder loaded last; empty: the one the engine was started on
    steps: int = 0
    preemptions: int = 0
    running: dict[str, int] = field(default_factory=dict)  # chunk_id -> tokens generated so far
    methods: tuple[str, ...] = ()  # by which chunks can draft now, first what a chunk drafts by of itself
    node_id: str = ""
    started_at: float = 0.0  # unix seconds
    key_prefixes: tuple[str, ...] = ()  # a block of KV is kept under each of them, followed by `@` and its name in hex
    token_bytes: int = 0  # KV of one token, over all ranks
    pool_problem: str = ""  # why this replica runs without the pool that it should have
    kv_counts: dict[str, int] = field(default_factory=dict)  # since the replica started, by WHAT.CAUSE
    speeds: dict[str, float] | None = None  # see deployments.engine.speeds
    # Since the replica started: steps and their microseconds, tokens, verifications; see deployments.engine.drafts too.
    work: dict[str, int] = field(default_factory=dict)
    step_cost: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # tokens, seconds; see policies.stepcost
