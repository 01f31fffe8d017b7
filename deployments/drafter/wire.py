"""What engines and drafters say to each other: a list of messages in one frame of msgpack, nothing that runs code.

Positions are those of the context. A guess repeats all that is drafted from a confirmed position on, so whoever reads
it compares it with what it knows; one that was overtaken, or lost, does no harm. Invariant: `decode` gives well-formed
messages or raises ValueError.
"""

from typing import NamedTuple

import msgpack
import numpy as np

MOST_TOKENS = 1 << 24
"""Of a context in one message: beyond every model, and 64 MiB."""


class Open(NamedTuple):
    """To a drafter: draft for this sample, with the noise of `key`, from the context `tokens` (int32) on. Said again
    under the same name it changes the window and the end, and costs nothing that was computed."""

    name: str
    key: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    prompt_tokens: int
    end: int  # nothing is wanted at or behind this position
    window: int
    coupled: bool
    tokens: np.ndarray


class Confirm(NamedTuple):
    """To a drafter: the sample has these tokens from position `start` on."""

    name: str
    start: int
    tokens: list[int]


class Stop(NamedTuple):
    """To a drafter: nothing more for this sample."""

    name: str


class Guess(NamedTuple):
    """To an engine: what may follow the first `start` tokens, which are confirmed. Since the sample was opened the
    turn of `tested` drafts has come, all before them being right, and `accepted` of these were right. Without tokens:
    the drafter is near, and will have some once the engine waits for it."""

    name: str
    start: int
    tokens: list[int]
    tested: int
    accepted: int


class Unknown(NamedTuple):
    """To an engine: this drafter does not know the sample (any more); open it again."""

    name: str


Message = Open | Confirm | Stop | Guess | Unknown
KINDS: tuple[type[Message], ...] = (Open, Confirm, Stop, Guess, Unknown)


def encode(messages: list[Message]) -> bytes:
    """One frame."""
    return msgpack.packb([(KINDS.index(type(message)), *map(_plain, message)) for message in messages])


def decode(frame: bytes) -> list[Message]:
    """The messages of a frame; ValueError when it is not one."""
    try:
        return [_message(kind, fields) for kind, *fields in msgpack.unpackb(frame, max_bin_len=4 * MOST_TOKENS)]
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ValueError(f"not a frame of drafting messages: {error}") from error


def _plain(value):
    return value.astype("<i4").tobytes() if isinstance(value, np.ndarray) else value


def _message(kind: int, fields: list) -> Message:
    if not 0 <= kind < len(KINDS):
        raise ValueError(f"no message is of kind {kind}")
    message = KINDS[kind](*fields)
    for value, wanted in zip(message, KINDS[kind].__annotations__.values(), strict=True):
        known = bytes if wanted is np.ndarray else getattr(wanted, "__origin__", wanted)
        if not isinstance(value, known) or (known is list and not all(isinstance(token, int) for token in value)):
            raise ValueError(f"{KINDS[kind].__name__}: {type(value).__name__} where {wanted} belongs")
    if kind == 0:
        return message._replace(tokens=np.frombuffer(message.tokens, "<i4"))
    return message
