"""The messages of a line as msgpack, without executable content.

Invariant: `decode` returns a well-formed message or raises BadFrame. A chunk's end that cannot be read names its chunk,
so that the chunk fails and nothing else does.
"""

from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pydantic import BaseModel, TypeAdapter

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.policies.families.drafting import Drafting, DraftingPolicy
from tailrace.policies.families.registry import members

_POLICIES = tuple(members("drafting").values())

REPEATED = (SamplingParams, *_POLICIES)
"""Models that all chunks of a group share. They are frozen, so each is encoded and decoded once."""

DTYPES = ("<i4", "<f4", "<i8")
"""Types of arrays in messages. An array is encoded as the index of its type, and its bytes."""


class Start(NamedTuple):
    """To an engine: run this chunk."""

    chunk: ChunkRequest


class Abort(NamedTuple):
    """To an engine: end this chunk after the step in progress. `keep_kv`: its sample will continue elsewhere."""

    chunk_id: str
    keep_kv: bool


class Pulse(NamedTuple):
    """To an engine: the coordinator lives. `report_s`: seconds between further reports."""

    report_s: float


class ChunkEnded(NamedTuple):
    """To the coordinator: a chunk has ended."""

    chunk_id: str
    result: ChunkResult


class Cause(StrEnum):
    """Reason why a chunk failed."""

    DOWN = "down"  # the engine is broken: its chunks must run elsewhere
    REFUSED = "refused"  # no replica can run the sample
    CHUNK = "chunk"  # this chunk alone, as far as its replica knows


class ChunkFailure(NamedTuple):
    """To the coordinator: a chunk has failed, or was refused. `text`: one line."""

    chunk_id: str
    cause: Cause
    text: str


class Report(NamedTuple):
    """To the coordinator: the replica's state. `sent_s`: time of sending, on the sender's clock."""

    sent_s: float
    stats: EngineStats


Message = Start | Abort | Pulse | ChunkEnded | ChunkFailure | Report
KINDS: tuple[type[Message], ...] = (Start, Abort, Pulse, ChunkEnded, ChunkFailure, Report)


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
    """Returns the payload of a message. Raises TypeError if a value is of no known type."""
    return bytes((KINDS.index(type(message)),)) + _encoder.encode(tuple(message))


def decode(payload: bytes) -> Message:
    """Returns the message of a payload. Raises BadFrame."""
    kind, body = payload[0] if payload else -1, memoryview(payload)[1:]
    chunk_id = ""
    try:
        if not 0 <= kind < len(KINDS):
            raise ValueError(f"unknown message kind {kind}")
        if KINDS[kind] is ChunkEnded:
            chunk_id, result = _ended.decode(body)
            return ChunkEnded(chunk_id, _result.decode(result))
        return KINDS[kind](*_decoders[kind].decode(body))
    except (ValueError, TypeError, LookupError, ArithmeticError, msgspec.MsgspecError) as error:
        raise BadFrame(f"not a message of a line: {' '.join(str(error).split())}", chunk_id) from error


def _plain(value: Any) -> Any:
    """Returns values without a msgpack type as ones that have one."""
    if isinstance(value, np.ndarray):
        return DTYPES.index(value.dtype.str), np.ascontiguousarray(value).data.cast("B")
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, BaseModel):
        return _json(value)
    raise TypeError(f"{type(value).__name__} is not carried by a line")


def _made(kind: type, value: Any) -> Any:
    """Returns the value of a type that msgpack does not have."""
    if kind is np.ndarray:
        place, data = value
        return np.frombuffer(data, DTYPES[place])
    if kind is Drafting or issubclass(kind, BaseModel):
        return _model(kind, value)
    raise TypeError(f"{kind.__name__} is not carried by a line")


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


def _decoder(kind: type[Message]) -> msgspec.msgpack.Decoder:
    return msgspec.msgpack.Decoder(tuple[tuple(kind.__annotations__.values())], dec_hook=_made, strict=False)


_drafting = TypeAdapter(DraftingPolicy)
_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoders = {number: _decoder(kind) for number, kind in enumerate(KINDS) if kind is not ChunkEnded}
_ended = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_result = msgspec.msgpack.Decoder(ChunkResult, dec_hook=_made, strict=False)
