"""What happens to a rollout: the only input of `RolloutCore`. The shell stamps `now` (seconds, monotonic).

Every event is a value. Events that name a chunk must name a running one; the core raises otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class IllegalEvent(ValueError):
    """An event that cannot happen in this state; the core has not changed."""


class ChunkEnd(StrEnum):
    STOP = "stop"  # a stop token: the sample is done
    LENGTH = "length"  # the chunk's max_tokens, or the model's context, is used up
    ABORTED = "aborted"  # stopped on request; the tokens so far are good


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A prompt of `prompt_tokens` and its samples; `max_tokens` bounds one sample over all its chunks.

    `past_lengths`: tokens of earlier answers to this prompt, one tuple per epoch, newest first.
    """

    group_id: str
    prompt_tokens: int
    samples: int
    max_tokens: int
    past_lengths: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplesSubmitted:
    now: float
    batch_id: str
    groups: tuple[GroupSpec, ...]


@dataclass(frozen=True, slots=True)
class LengthsRevealed:
    """True lengths by sample id. Only a simulator or a replayed trace can send this (law 3)."""

    now: float
    lengths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BatchCancelled:
    now: float
    batch_id: str


@dataclass(frozen=True, slots=True)
class ChunkFinished:
    """`stored_tokens`: tokens of the sample's context, prompt and answer, whose KV the pool holds as the chunk ends;
    `drafted_tokens`, `accepted_tokens`: what was verified of drafts. `model_tested`: tokens of a draft model whose turn
    came, all before them being right, verified or not; `model_accepted`: those of them that were right."""

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


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """The chunk made nothing that counts; `error` is one line."""

    now: float
    chunk_id: str
    error: str


@dataclass(frozen=True, slots=True)
class TokensStreamed:
    """A running chunk had made `tokens` tokens when it was looked at, at `observed_at`."""

    now: float
    chunk_id: str
    tokens: int
    observed_at: float


@dataclass(frozen=True, slots=True)
class ReplicaJoined:
    """A replica is ready under `weights_version`. Sent again when that, or `methods`, has changed.

    Replicas with one `node_id` share that node's part of the KV pool. `methods`: by which chunks can draft there now,
    first what a chunk drafts by by itself; empty: none can be told by which.
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


@dataclass(frozen=True, slots=True)
class ReplicaLeft:
    now: float
    replica_id: str
    error: str


@dataclass(frozen=True, slots=True)
class ReplicasReserved:
    """At least `replicas` are wanted from now until the next batch has come: a driver knows that it soon will."""

    now: float
    replicas: int


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """From now on chunks start only on replicas that hold `version`; chunks of another are told to stop at once."""

    now: float
    version: int


@dataclass(frozen=True, slots=True)
class ReplicaMeasured:
    """Speeds of a replica as of `observed_at`: prefill; fetching KV from the pool, `fetch_base_s` each time and
    `fetch_tokens_s` (0: it cannot); a decode step of `step_base_s + step_per_chunk_s * chunks running`, with as many
    draft tokens of each as lately."""

    now: float
    replica_id: str
    prefill_tokens_s: float
    fetch_tokens_s: float
    fetch_base_s: float
    step_base_s: float
    step_per_chunk_s: float
    observed_at: float


@dataclass(frozen=True, slots=True)
class PoolReported:
    """How full the KV pool was at `observed_at`, all tiers together, in tokens of KV."""

    now: float
    capacity_tokens: int
    used_tokens: int
    observed_at: float


@dataclass(frozen=True, slots=True)
class KvLost:
    """The pool has lost the KV of these samples; None: of all (its master restarted). Unknown ids are ignored."""

    now: float
    sample_ids: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


Event = (
    SamplesSubmitted
    | LengthsRevealed
    | BatchCancelled
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
