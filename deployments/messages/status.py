"""Status messages: replicas, batches, samples, the KV pool, and the snapshot of the service that holds them all.

Invariant: `Rollouts.status` alone makes a `ServiceSnapshot`. Status, `top`, boards and metrics are functions of it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, InstanceOf, field_serializer

from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.rollout import Message, Segment
from tailrace.policies.protocol.exactness import Exactness
from tailrace.policies.protocol.performance import Performance


class ReplicaStatus(NamedTuple):
    """A replica by the core's books, and from `preemptions` on by its own last report, see `EngineStats`.

    A tuple, since each snapshot makes one for each replica: pydantic takes ten times as long.
    """

    replica_id: str
    ready: bool
    running: int
    max_running: int
    kv_used_share: float
    weights_version: int  # -1: nothing starts there, as it holds another content of the version, or is paused
    closing: bool = False  # it will be given back, and takes no new chunks
    aside: str = ""  # why nothing starts on it for a while: chunks of several samples failed there; empty: it is not
    copies: int = 0  # its running chunks that race with another replica's
    node_id: str = ""
    observed_s: float | None = None  # age of its last report; None: it has sent none
    preemptions: int = 0
    work: Mapping[str, int] = {}
    performance: Performance | None = None
    cores: tuple[int, ...] = ()  # cores of its node that its engine is bound to; empty: none
    dtype: str = ""
    ranks: int = 1
    weight_transfer: str = ""
    max_loras: int = 0
    step_counts: tuple[int, ...] = ()
    weights_pause_s: float = 0.0
    keeps_routes: bool = False

    @property
    def state(self) -> str:
        """Returns ready, not ready, closing or aside."""
        if self.aside:
            return "aside"
        if self.closing:
            return "closing"
        return "ready" if self.ready else "not ready"


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
    ago. `core_id`: its name in the core, unique among all batches.
    """

    batch_id: str
    core_id: str = ""
    samples: int
    ended: int
    groups: int
    emitted: int
    tokens: int
    tail: bool  # True once 90 % of the samples have ended
    seconds: float
    began_s: float = 0.0  # unix seconds
    quiet_s: float = 0.0  # seconds since the end of its last chunk
    session: bool = False  # its samples are single ones, and it has no tail


class SampleStatus(Message):
    """A sample that has not ended. `tokens`: answer tokens, those of its running chunk as last reported.
    `expected_tokens`: expected length of the whole answer, by the `lengths` policy. `copies`: running copies that race
    with it. `why`: why it is where it is.
    """

    sample_id: str
    state: str  # waiting, running or held
    replica_id: str | None  # where its present or last chunk runs
    tokens: int
    expected_tokens: int
    max_tokens: int
    chunks: int
    copies: int
    why: str = ""


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
    """A chunk that failed, a replica that left or a sample that was given up, with its time in unix seconds. `number`:
    grows by one.
    """

    number: int
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


class ServiceSnapshot(Message):
    """The service at one moment, read from the coordinator's books and the replicas' last reports.

    `longest`, `waiting_for` and the tokens of batches come from a survey of the samples: see `feed.survey`.
    """

    coordinator_s: float = 0.0  # seconds since this coordinator began
    waiting: int
    running: int
    held: int = 0  # samples between two turns
    queued: dict[int, int] = Field(default_factory=dict)  # queued samples by the priority of their batch
    waiting_for: dict[str, int] = Field(default_factory=dict)  # waiting and held samples by the thing they wait for
    longest: tuple[SampleStatus, ...] = ()  # the longest unended samples, longest first, as many as were requested
    batches: tuple[BatchStatus, ...]
    replicas: tuple[InstanceOf[ReplicaStatus], ...]
    wanted: int | None = None  # replicas wanted; None: their number is fixed
    wanted_why: str = ""
    observed_s: float  # age of the oldest replica report used
    waits_for: str | None  # the reason why no chunk can run, if there is one
    policies: dict[str, Any]
    weights_version: int = 0
    weights_digest: str = ""  # names their content; empty until a replica has read it
    weights_source: str = ""  # their folder or memory; empty: the one that the engines were started on
    weights_problem: str = ""  # error of the last load
    pool: PoolView | None = None  # None if the service has none
    context: dict[str, int] | None = None  # calls to the group context by kind, or None if the service has none
    held_bytes: dict[str, int] = Field(default_factory=dict)  # bytes of finished groups that drivers have not received
    at_admission: tuple[str, ...] = ()  # batches that wait for a change of policies, limits or journal
    model: str = ""  # the folder of the model and its tokenizer
    max_model_len: int = 0  # tokens of prompt and answer
    exactness: Exactness = "bits"  # what a second computation of a sample promises
    paused: bool = False  # no chunk starts until a resume, or samples in flight are ending before that
    asleep: tuple[str, ...] = ()  # parts of the engines' memory that are given back, see `RolloutClient.sleep`
    adapters: tuple[Adapter, ...] = ()  # adapters that requests may name
    contained: dict[str, int] = Field(default_factory=dict)  # contained errors, by PLACE.KIND
    acceptance: dict[str, Any] = Field(default_factory=dict)  # drafts of ended chunks, see `feed.acceptance`
    faults: tuple[FaultLog, ...] = ()  # the newest, oldest first

    @field_serializer("replicas")
    def _by_field(self, replicas: tuple[ReplicaStatus, ...]) -> list[dict[str, Any]]:
        return [replica._asdict() for replica in replicas]
