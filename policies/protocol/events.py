"""Events: the only input of `RolloutCore`. The shell stamps `now` (seconds, monotonic).

Every event is a value. Events that name one chunk must name a running one; the core raises otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tailrace.policies.protocol.performance import Performance


class IllegalEvent(ValueError):
    """An event that is impossible in this state. The core has not changed."""


class ChunkEnd(StrEnum):
    STOP = "stop"  # a stop token: the sample is done
    LENGTH = "length"  # the chunk's max_tokens, or the model's context, is used up
    ABORTED = "aborted"  # stopped on request; the tokens so far are good


@dataclass(frozen=True, slots=True)
class Begun:
    """A sample of which an earlier coordinator has made `tokens` tokens. `stopped`: the last one was a stop token.
    `version`: weights that made it.
    """

    index: int
    tokens: int
    stopped: bool
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """A driver's own prediction for a prompt: `number` is greater where answers are expected to be longer, on any
    scale. `quality`, 0 to 1: correlation of ranked predictions with ranked lengths of answers.
    """

    number: float
    quality: float


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A prompt of `prompt_tokens` and its samples; `max_tokens` bounds one sample over all its chunks.

    `past_lengths`: tokens of earlier answers to this prompt, one tuple per epoch, newest first. `begun`: samples that
    an earlier coordinator has begun. `open`: more samples may come, as a later spec with this name in the same batch,
    and the group is emitted after a spec that is not open. Such a spec has the same sizes and neither `past_lengths`
    nor `begun`; its samples, which may be none, are numbered after the earlier ones. `chunk_tokens`: maximum length of
    the chunks of this spec's samples, whatever `chunking` says: their readers wait. `hold_s`: seconds for which a
    sample of this spec is held after its turn, for the next one; inf: as long as the policy of trajectories says; 0: it
    has one turn. Then `max_tokens` bounds its first turn. `prediction`: of the length of its answers, or None.
    `follows`: a held sample whose trajectory the first sample of this spec continues, with a context that begins alike.
    """

    group_id: str
    prompt_tokens: int
    samples: int
    max_tokens: int
    past_lengths: tuple[tuple[int, ...], ...] = ()
    begun: tuple[Begun, ...] = ()
    open: bool = False
    chunk_tokens: int | None = None
    hold_s: float = 0.0
    prediction: Prediction | None = None
    follows: str | None = None


@dataclass(frozen=True, slots=True)
class SamplesSubmitted:
    """A batch of groups is submitted. `priority` and `share` (above 0) are for the `fairness` policy, `step` (of
    training) for orderings that bind whole batches.

    `open`: more may come, in later events of this name with the same priority, share and step. One that is not open
    closes the batch and its groups; it may have no groups.
    """

    now: float
    batch_id: str
    groups: tuple[GroupSpec, ...]
    priority: int = 0
    share: float = 1.0
    step: int = 0
    open: bool = False


@dataclass(frozen=True, slots=True)
class LengthsRevealed:
    """True lengths by sample id. Only a simulator or a replayed trace can send this (law 3)."""

    now: float
    lengths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LengthsSeen:
    """Lengths of answers to other prompts, from before this core: for each prompt those of earlier epochs, newest
    first, and its last ones.
    """

    now: float
    prompts: tuple[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class BatchCancelled:
    """A driver cancels its batch, or has gone. An open batch is closed."""

    now: float
    batch_id: str


@dataclass(frozen=True, slots=True)
class SampleCancelled:
    """A driver cancels one sample, or its deadline has passed. A held sample ends as its last turn did. Nothing happens
    if it has ended before its group.
    """

    now: float
    sample_id: str


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """The last turn of a held sample called a tool, by which the gap to its next turn is expected. Nothing happens if
    it is not held.
    """

    now: float
    sample_id: str
    tool: str


@dataclass(frozen=True, slots=True)
class SampleReturned:
    """The next turn of a held sample: its context grows by `outside_tokens`, from tools or users, and it makes at most
    `max_tokens` more. `hold_s`: as in `GroupSpec`, after this turn.
    """

    now: float
    sample_id: str
    outside_tokens: int
    max_tokens: int
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkFinished:
    """A chunk ended with `new_tokens` tokens.

    `stored_tokens`: tokens of the sample's context (prompt and answer) whose KV the pool holds at the chunk's end.
    `drafted_tokens`, `accepted_tokens`: draft tokens verified and accepted; `tested_tokens`: of the verified ones those
    that were tested (see `performance`). `model_tested`: draft-model tokens whose
    position was reached with all earlier ones right, verified or overtaken; `model_accepted`: the right ones of them.
    For readers of journals alone: `verifications`: engine steps that made its tokens; `pulled_tokens`: context tokens
    whose KV came from the pool; `computed_tokens`: those whose KV was computed.
    """

    now: float
    chunk_id: str
    new_tokens: int
    end: ChunkEnd
    weights_version: int
    stored_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    model_tested: int = 0
    model_accepted: int = 0
    verifications: int = 0
    pulled_tokens: int = 0
    computed_tokens: int = 0
    tested_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """The chunk failed and none of its tokens count. `error` is one line. `of_sample`: it would fail on any replica."""

    now: float
    chunk_id: str
    error: str
    of_sample: bool = False


@dataclass(frozen=True, slots=True)
class TokensStreamed:
    """A replica's report: chunks that ran there had generated `tokens` tokens, by chunk id, at `observed_at`. Ids of
    chunks that do not run any more are ignored."""

    now: float
    tokens: Mapping[str, int]
    observed_at: float


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A replica is ready under `weights_version`. Sent again when the version or `methods` has changed.

    Replicas of one `node_id` share that node's part of the KV pool. `methods`: draft methods available on the replica;
    the first is the default. Empty if the method cannot be selected per chunk. `started_at`: unix seconds; Serve stops
    the newest first.
    """

    now: float
    replica_id: str
    block_tokens: int
    kv_capacity_blocks: int
    max_running: int
    draft_tokens: int
    weights_version: int
    node_id: str = ""
    methods: tuple[str, ...] = ()
    started_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaLeft:
    """A replica is gone, and its running chunks with it. `error` is one line.

    `took_chunk`: False if it was gone before it took a chunk, so that no sample can be the cause.
    """

    now: float
    replica_id: str
    error: str
    took_chunk: bool = True


@dataclass(frozen=True, slots=True)
class ReplicasReserved:
    """A driver announces its next batch: keep at least `replicas` replicas until it arrives."""

    now: float
    replicas: int


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """New weights: chunks now start only on replicas that hold `version`; running chunks of other versions stop. With
    `kv_on_update: finish`, samples that have begun continue on replicas that keep older weights.
    """

    now: float
    version: int


@dataclass(frozen=True, slots=True)
class ReplicaMeasured:
    """The measured performance of a replica."""

    now: float
    replica_id: str
    performance: Performance


@dataclass(frozen=True, slots=True)
class PoolReported:
    """Capacity and use of the KV pool at `observed_at`, over all tiers, in tokens of KV."""

    now: float
    capacity_tokens: int
    used_tokens: int
    observed_at: float


@dataclass(frozen=True, slots=True)
class KvLost:
    """The pool lost the KV of these samples, or of all if None (its master restarted). Unknown ids are ignored."""

    now: float
    sample_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: the core decides with every event observed so far."""

    now: float


Event = (
    SamplesSubmitted
    | LengthsRevealed
    | LengthsSeen
    | BatchCancelled
    | SampleCancelled
    | SampleReturned
    | ToolCalled
    | ChunkFinished
    | ChunkFailed
    | TokensStreamed
    | ReplicaJoined
    | ReplicaLeft
    | ReplicasReserved
    | WeightsChanged
    | ReplicaMeasured
    | PoolReported
    | KvLost
)
