"""The messages of a line.

Invariant: `decode` returns a well-formed message or raises BadFrame. A chunk's end that cannot be read names its chunk,
so that the chunk fails and nothing else does.
"""

from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel, TypeAdapter

from tailrace.deployments.channel import codec
from tailrace.deployments.channel.codec import Codec, WireMessage
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.policies.families.drafting import Drafting, DraftingPolicy
from tailrace.policies.families.registry import members

_POLICIES = tuple(members("drafting").values())

REPEATED = (SamplingParams, *_POLICIES)
"""Models that all chunks of a group share. They are frozen, so each is encoded and decoded once."""


class Start(WireMessage):
    """To an engine: run this chunk."""

    chunk: ChunkRequest


class Abort(WireMessage):
    """To an engine: end this chunk after the step in progress. `keep_kv`: its sample will continue elsewhere."""

    chunk_id: str
    keep_kv: bool


class Pulse(WireMessage):
    """To an engine: the coordinator lives. `report_s`: seconds between further reports."""

    report_s: float


class ChunkEnded(WireMessage):
    """To the coordinator: a chunk has ended."""

    chunk_id: str
    result: ChunkResult


class Cause(StrEnum):
    """Reason why a chunk failed."""

    DOWN = "down"  # the engine is broken: its chunks must run elsewhere
    REFUSED = "refused"  # no replica can run the sample
    CHUNK = "chunk"  # this chunk alone, as far as its replica knows


class ChunkFailure(WireMessage):
    """To the coordinator: a chunk has failed, or was refused. `text`: one line."""

    chunk_id: str
    cause: Cause
    text: str


class Report(WireMessage):
    """To the coordinator: the replica's state. `sent_s`: time of sending, on the sender's clock."""

    sent_s: float
    stats: EngineStats


Message = Start | Abort | Pulse | ChunkEnded | ChunkFailure | Report


class BadFrame(ValueError):
    """Raised for bytes that are no message. `chunk_id`: the chunk whose end it would be, or empty."""

    def __init__(self, reason: str, chunk_id: str = ""):
        super().__init__(reason)
        self.chunk_id = chunk_id


def carries(chunk: ChunkRequest) -> bool:
    """Returns whether a line can carry this chunk. Chunks with images or a user's own drafting policy go over Ray,
    which has their bytes or their code.
    """
    policy = chunk.draft.policy if chunk.draft is not None else None
    return chunk.features is None and (policy is None or type(policy) in _POLICIES)


def encode(message: Message) -> bytes:
    """Returns the payload of a message. Raises TypeError or ValueError if a value is of no known type."""
    return _codec.encode(message)


def decode(payload: bytes) -> Message:
    """Returns the message of a payload. Raises BadFrame."""
    try:
        return _codec.decode(payload)
    except ValueError as error:
        raise BadFrame(f"not a message of a line: {error}", _chunk_of(payload)) from error


def _chunk_of(payload: bytes) -> str:
    """Returns the chunk whose end a malformed payload would be, or an empty text."""
    try:
        return _head.decode(payload).chunk_id
    except ValueError:
        return ""


def _plain(value: Any) -> Any:
    return _json(value) if isinstance(value, BaseModel) else codec.plain(value)


def _made(kind: type, value: Any) -> Any:
    return _model(kind, value) if kind is Drafting or issubclass(kind, BaseModel) else codec.made(kind, value)


def _json(model: BaseModel) -> str:
    return _known_json(model) if isinstance(model, REPEATED) else model.model_dump_json()


def _model(kind: type, text: str) -> BaseModel:
    return _known_model(kind, text) if kind in (Drafting, SamplingParams) else kind.model_validate_json(text)


@lru_cache(maxsize=1024)
def _known_json(model: BaseModel) -> str:
    return model.model_dump_json()


@lru_cache(maxsize=1024)
def _known_model(kind: type, text: str) -> BaseModel:
    return (_drafting if kind is Drafting else TypeAdapter(kind)).validate_json(text)


class _EndedHead(WireMessage, tag=ChunkEnded.__name__):
    """A ChunkEnded whose result cannot be read."""

    chunk_id: str
    result: msgspec.Raw


_drafting = TypeAdapter(DraftingPolicy)
_codec = Codec(Message, strict=False, plain=_plain, made=_made)
_head = Codec(_EndedHead)
