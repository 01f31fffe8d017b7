"""What a shell must do: the only output of `RolloutCore`. Every action says why (`reason`)."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class SampleEnd(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


class DraftMode(NamedTuple):
    """How a draft model drafts for a sample: at most this many tokens of a draft, 0: it does not; and whether it waits
    for them to be verified, and the sample for them."""

    window: int
    coupled: bool


@dataclass(frozen=True, slots=True)
class StartChunk:
    """Generate at most `max_tokens` tokens of a sample that has `start` already, on `replica_id`.

    KV is read and written under `kv_version` only. The engine looks into the pool if that would gain at least
    `min_pull_tokens` over its own cache; None: it does not look. `expected_tokens` is the length that the whole answer
    is expected to have; from `class_starts` answer tokens on it counts as no short one, and as a long one. All three
    are estimates as the chunk starts: only drafting reads them.

    `copy_of`: it races with that chunk, whose tokens it makes too; `method`: by which it drafts (None: as its replica
    does by itself).
    `way`: how a draft model drafts, where there is one (None: as that is configured).
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
    """Stop a running chunk at the next token; its `ChunkFinished` still has to come.

    `keep_kv`: whether somebody continues with its KV, so that what is not in the pool yet is still worth storing.
    """

    chunk_id: str
    replica_id: str
    keep_kv: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EndSample:
    """The sample has ended; nothing of it will be asked for again. `error` is set when it failed."""

    sample_id: str
    end: SampleEnd
    error: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class EmitGroup:
    """Every sample of the group has ended: hand it to the driver. The core has forgotten it."""

    batch_id: str
    group_id: str
    reason: str


class ReleaseCause(StrEnum):
    ENDED = "ended"  # nobody continues with it
    STALE = "stale"  # it is of other weights than what continues
    FULL = "full"  # others need the room sooner


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """The pool need not hold this any more: the sample's own KV after the prompt, or, with `sample_id` None, the
    prompt's that the group's samples share."""

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
    """From now on there should be `replicas` engine replicas; those that stop for it run nothing. `drafters`: replicas
    of a draft model, in the place of engines that are not, where their number is the core's to say."""

    replicas: int
    reason: str
    drafters: int = 0


Action = StartChunk | AbortChunk | EndSample | EmitGroup | ReleaseKv | Prefetch | SetReplicas
