"""Status messages: replicas, batches, the KV pool and the service as a whole, for drivers and people."""

from typing import Any

from pydantic import Field

from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import Message, Segment
from tailrace.policies.protocol.performance import Performance


class ReplicaStatus(Message):
    replica_id: str
    ready: bool
    running: int
    max_running: int
    kv_used_share: float
    weights_version: int  # -1: nothing starts there, as it holds another content of the version, or is paused
    preemptions: int
    work: dict[str, int] = Field(default_factory=dict)  # see EngineStats
    closing: bool = False  # it will be given back, and takes no new chunks
    aside: str = ""  # why nothing starts on it for a while: chunks of several samples failed there; empty: it is not
    performance: Performance | None = None  # see EngineStats
    node_id: str = ""
    cores: tuple[int, ...] = ()  # cores of its node that its engine is bound to; empty: none
    dtype: str = ""  # see EngineStats, as the next three
    ranks: int = 1
    weight_transfer: str = ""
    max_loras: int = 0


class ReplicasChanged(Message):
    """Engine replicas that are up and wanted, since `at_s` (unix seconds). Replicas beyond the wanted number stop, and
    then free their resources for Ray.
    """

    replicas: int
    wanted: int
    reason: str
    at_s: float


class BatchStatus(Message):
    """Progress of a batch. `tokens`: tokens of ended chunks, and of running chunks as last reported, `observed_s`
    ago.
    """

    batch_id: str
    samples: int
    ended: int
    groups: int
    emitted: int
    tokens: int
    tail: bool  # True once 90 % of the samples have ended
    seconds: float


class SampleStatus(Message):
    """A sample that has not ended. `tokens`: answer tokens, those of its running chunk as last reported.
    `expected_tokens`: expected length of the whole answer, by the `lengths` policy. `copies`: running copies that race
    with it.
    """

    sample_id: str
    state: str  # waiting, running or held
    replica_id: str | None  # where its present or last chunk runs
    tokens: int
    expected_tokens: int
    max_tokens: int
    chunks: int
    copies: int


class SampleDetail(Message):
    """A sample that has not ended, up to its last ended chunk. `segments`: segments of its present turn, each of one
    replica and one weights version. `text`: text of its last `text_tokens` tokens, those of its running chunk included.
    """

    sample_id: str
    tokens: int
    segments: tuple[Segment, ...]
    cached_tokens: int
    computed_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    text_tokens: int
    text: str


class ChunkLog(Message):
    """One chunk of a sample, with the reason for its replica. Times are unix seconds; `ended_s`: None while it runs.

    `end`: stop, length, aborted, failed or lost; `asked`: why it was asked to stop before that; `copy_of`: the chunk
    that it races with, or None; `method`: the copy's draft method.
    """

    chunk_id: str
    replica_id: str
    began_s: float
    ended_s: float | None
    start: int
    new_tokens: int
    reason: str
    end: str
    asked: str
    error: str
    copy_of: str | None
    method: str | None


class SampleLog(Message):
    """A sample as far as the service knows it. `dropped`: number of chunks before those in `chunks`. `moves`: number of
    these that ran on another replica than the one before. `why`: why it is where it is, or why it ended.
    """

    sample_id: str
    state: str  # waiting, running, held or ended
    end: str  # stop, length, cancelled or failed; empty: it has not ended
    why: str
    error: str
    tokens: int
    expected_tokens: int | None  # length of the whole answer; None once it has ended
    max_tokens: int | None
    moves: int
    dropped: int
    chunks: tuple[ChunkLog, ...]


class FaultLog(Message):
    """A chunk that failed, a replica that left or a sample that was given up, with its time in unix seconds."""

    at_s: float
    sample_id: str
    replica_id: str
    text: str


class BatchLog(Message):
    """A batch as far as the service knows it: its progress (None once it is over), its samples by state or end, the
    last faults, and samples: those with failed chunks first, then those with many chunks.
    """

    batch_id: str
    status: BatchStatus | None
    counts: dict[str, int]
    chunks: int
    moves: int
    faults: tuple[FaultLog, ...]
    samples: tuple[SampleLog, ...]


class PoolView(Message):
    """The KV pool: its own figures (see kvpool.status.PoolStatus), or None if it is down; and counts of its use.

    Counts are by EVENT.CAUSE, over all replicas: tokens by the source of their KV (`local_tokens`, `pool_tokens`,
    `recomputed_tokens.CAUSE`), bytes, failures, and operations by duration (`load_ms.N`: N milliseconds or less).
    """

    status: dict[str, Any] | None
    token_bytes: int
    counts: dict[str, int]
    problem: str | None = None  # error of the last call to the pool's master
    problems: dict[str, str] = Field(default_factory=dict)  # replicas that had to start without the pool, and why
    keys_by_version: dict[int, int] | None = None  # only on request


class ServiceStatus(Message):
    waiting: int
    running: int
    batches: tuple[BatchStatus, ...]
    replicas: tuple[ReplicaStatus, ...]
    observed_s: float  # age of the oldest replica report used
    waits_for: str | None  # the reason why no chunk can run, if there is one
    policies: dict[str, Any]
    weights_version: int = 0
    weights_digest: str = ""  # names their content; empty until a replica has read it
    weights_source: str = ""  # their folder or memory; empty: the one that the engines were started on
    pool: PoolView | None = None  # None if the service has none
    context: dict[str, int] | None = None  # calls to the group context by kind, or None if the service has none
    held_bytes: dict[str, int] = Field(default_factory=dict)  # bytes of finished groups that drivers have not received
    at_door: tuple[str, ...] = ()  # batches that wait for a change of policies, limits or journal
    model: str = ""  # the folder of the model and its tokenizer
    max_model_len: int = 0  # tokens of prompt and answer
    paused: bool = False  # no chunk starts until a resume, or samples in flight are ending before that
    asleep: tuple[str, ...] = ()  # parts of the engines' memory that are given back, see `RolloutClient.sleep`
    held: int = 0  # samples between two turns
    adapters: tuple[Adapter, ...] = ()  # adapters that requests may name
    contained: dict[str, int] = Field(default_factory=dict)  # contained errors, by PLACE.KIND
