"""What a shell must do: the only output of `RolloutCore`. Every action says why (`reason`)."""

from dataclasses import dataclass
from enum import StrEnum


class SampleEnd(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StartChunk:
    """Generate at most `max_tokens` tokens of a sample that has `start` already, on `replica_id`."""

    chunk_id: str
    sample_id: str
    replica_id: str
    start: int
    max_tokens: int
    weights_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class AbortChunk:
    """Stop a running chunk at the next token; its `ChunkFinished` still has to come."""

    chunk_id: str
    replica_id: str
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


Action = StartChunk | AbortChunk | EndSample | EmitGroup
