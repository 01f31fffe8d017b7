"""Actions for the shell: the only output of `RolloutCore`. Every action carries its `reason`."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class SampleEnd(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class DraftMode(NamedTuple):
    """How a draft model drafts for a sample. `window`: maximum number of tokens of a draft, 0 for none. `coupled`:
    drafter and sample take turns, each waiting for the other.
    """

    window: int
    coupled: bool


@dataclass(frozen=True, slots=True)
class StartChunk:
    """Generate at most `max_tokens` tokens of a sample that has `start` already, on `replica_id`.

    KV is read and written under `kv_version` only. The engine pulls from the pool if that gains at least
    `min_pull_tokens` over its own cache, and never if None. `expected_tokens`: estimated length of the whole answer.
    `class_starts`: answer tokens from which it counts as medium and as long (DAS). Both are estimates at the chunk's
    start, read by drafting alone.

    `copy_of`: the chunk that this one races, making the same tokens, or None. `method`: the draft method, or None for
    the replica's default. `way`: the draft model's mode, or None for the configured one.
    """

    chunk_id: str
    sample_id: str
    replica_id: str
    start: int
    max_tokens: int
    weights_version: int
    kv_version: int
    min_pull_tokens: int | None
    expected_tokens: int
    class_starts: tuple[int, int]
    reason: str
    copy_of: str | None = None
    method: str | None = None
    way: DraftMode | None = None


@dataclass(frozen=True, slots=True)
class AbortChunk:
    """Stop a running chunk at the next token. Its `ChunkFinished` follows.

    `keep_kv`: the sample continues elsewhere, so KV that is not in the pool yet is worth storing.
    """

    chunk_id: str
    replica_id: str
    keep_kv: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EndSample:
    """The sample has ended and will not run again. `error` is set if it failed."""

    sample_id: str
    end: SampleEnd
    error: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class EndTurn:
    """A turn of the sample has ended. Its KV is held for the next one; `SampleReturned` or `EndSample` follows."""

    sample_id: str
    end: SampleEnd
    reason: str


@dataclass(frozen=True, slots=True)
class EmitGroup:
    """Every sample of the group has ended: deliver it to the driver. The core has removed it."""

    batch_id: str
    group_id: str
    reason: str


class ReleaseCause(StrEnum):
    ENDED = "ended"  # the sample or group has ended
    STALE = "stale"  # the sample continues under other weights
    FULL = "full"  # samples that run sooner need the room
    SUSPENDED = "suspended"  # its trajectory begins again later


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """Remove KV from the pool: the sample's own after the prompt, or, if `sample_id` is None, the prompt's, which the
    group's samples share."""

    group_id: str
    sample_id: str | None
    cause: ReleaseCause
    reason: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring this sample's KV into the memory of the node of `replica_id`, where it is expected to run next."""

    sample_id: str
    replica_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """Set the number of engine replicas to `replicas`; those that stop run nothing. `drafters`: number of draft-model
    replicas in the place of engines, where the core decides it."""

    replicas: int
    reason: str
    drafters: int = 0


Action = StartChunk | AbortChunk | EndTurn | EndSample | EmitGroup | ReleaseKv | Prefetch | SetReplicas
