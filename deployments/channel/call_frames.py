"""The messages of a gateway's line to the coordinator: calls, and their answers.

Invariant: `decode` returns a well-formed message or raises ValueError. Messages of the product travel as their fields,
and are checked where they arrive.
"""

from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel

from tailrace.deployments.channel import codec
from tailrace.deployments.channel.codec import Codec, WireMessage
from tailrace.deployments.messages.rollout import BatchSettings, Rejected
from tailrace.deployments.messages.session import SampleAnswer, SampleRequest, SampleTokens
from tailrace.deployments.messages.trajectory import TrajectoryOpening, TrajectoryState, TrajectoryTurn
from tailrace.deployments.results.columns import Column
from tailrace.deployments.results.later_text import LaterText
from tailrace.deployments.results.routed_experts import RoutedExperts

CALLS = (
    *("generate", "stream_sample", "cancel_samples"),
    *("open_trajectory", "read_trajectory", "add_turn", "end_trajectory"),
)
"""Methods of the coordinator that a line carries: the frequent ones. All others are calls of Ray."""

_CARRIED = {
    kind.__name__: kind
    for kind in (
        *(BatchSettings, SampleRequest, SampleAnswer, SampleTokens, Rejected),
        *(TrajectoryOpening, TrajectoryTurn, TrajectoryState),
    )
}

COLUMNS = ("<i4", "<f4", "<f8")
"""Types of columns. A column is an extension: the index of its type, and its bytes."""


class Call(WireMessage):
    """To the coordinator: make this call. `number`: names the call on its line."""

    number: int
    method: str
    role: str
    arguments: Any


class Left(WireMessage):
    """To the coordinator: the caller has left, and its call is cancelled."""

    number: int


class Item(WireMessage):
    """To the gateway: the answer of a call, or the next item of its stream."""

    number: int
    value: Any


class CallEnded(WireMessage):
    """To the gateway: the call gives nothing more. `error`: one line, or empty. `again`: ask another one."""

    number: int
    error: str = ""
    again: bool = False


class Beat(WireMessage):
    """Either way: the sender lives."""


Message = Call | Left | Item | CallEnded | Beat


def encode(message: Message) -> bytes:
    """Returns the payload of a message. Raises TypeError or ValueError if a value is not carried by this line."""
    return _codec.encode(message)


def decode(payload: bytes) -> Message:
    """Returns the message of a payload. Raises ValueError."""
    return _codec.decode(payload)


def named(value: Any) -> Any:
    """Returns an argument or answer in the form that `given` takes. Raises TypeError for another model."""
    if not isinstance(value, BaseModel):
        return tuple(map(named, value)) if isinstance(value, tuple) else value
    if (name := type(value).__name__) not in _CARRIED:
        raise TypeError(f"{name} is not carried by a gateway's line")
    return {name: value}


def given(value: Any) -> Any:
    """Returns a decoded argument or answer with its models. Raises ValueError if it is none of those carried."""
    if isinstance(value, dict):
        if len(value) != 1 or (name := next(iter(value))) not in _CARRIED:
            raise ValueError("a message of another release")
        return _CARRIED[name].model_validate(value[name])
    return tuple(map(given, value)) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    match value:
        case Column():
            return msgspec.msgpack.Ext(COLUMNS.index(value.array.dtype.str), value.array.tobytes())
        case BaseModel():
            if isinstance(value, LaterText):
                value.settle()
            return vars(value)
        case RoutedExperts():
            return value.base64()
    return codec.plain(value)


def _column(kind: int, data: memoryview) -> Column:
    return Column(np.frombuffer(data, COLUMNS[kind]))


_codec = Codec(Message, strict=False, plain=_plain, extension=_column)
