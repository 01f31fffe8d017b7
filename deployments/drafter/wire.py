"""Messages between engines and drafters: a list in one msgpack frame, without executable content.

Positions are those of the context. A guess repeats all draft tokens from a confirmed position, so its reader compares
it with its own tokens; an overtaken or lost guess is harmless. Invariant: `decode` returns well-formed messages or
raises ValueError.
"""

from typing import NamedTuple

import msgpack
import numpy as np

MAX_TOKENS = 1 << 24
"""Maximum context tokens of one message: above that of every model, and 64 MiB."""


class Open(NamedTuple):
    """To a drafter: draft for this sample, with the noise of `key`, after the context `tokens` (int32). Sent again
    under the same name it changes the mode and the end, and keeps the computed context."""

    name: str
    key: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop_token_ids: list[int]
    prompt_tokens: int
    end: int  # drafts end before this position
    window: int
    coupled: bool
    tokens: np.ndarray


class Confirm(NamedTuple):
    """To a drafter: the sample's tokens from position `start`."""

    name: str
    start: int
    tokens: list[int]


class Stop(NamedTuple):
    """To a drafter: end drafting for this sample."""

    name: str


class Guess(NamedTuple):
    """To an engine: a draft after the first `start` tokens, which are confirmed. `tested`: draft tokens since the
    opening that were compared with the sample, all tokens before them being right; `accepted`: the right ones of these.
    Without tokens: the drafter will soon have some, once the engine waits for it.
    """

    name: str
    start: int
    tokens: list[int]
    tested: int
    accepted: int


class Unknown(NamedTuple):
    """To an engine: the sample is not open at this drafter (any more); open it again."""

    name: str


class Stepped(NamedTuple):
    """To an engine: the drafter's last step, one token of each of `samples`, took `step_us` microseconds."""

    samples: int
    step_us: int


Message = Open | Confirm | Stop | Guess | Unknown | Stepped
KINDS: tuple[type[Message], ...] = (Open, Confirm, Stop, Guess, Unknown, Stepped)


def encode(messages: list[Message]) -> bytes:
    """Returns one frame."""
    return msgpack.packb([(KINDS.index(type(message)), *map(_plain, message)) for message in messages])


def decode(frame: bytes) -> list[Message]:
    """Returns the messages of a frame. Raises ValueError if it is malformed."""
    try:
        return [_message(kind, fields) for kind, *fields in msgpack.unpackb(frame, max_bin_len=4 * MAX_TOKENS)]
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise ValueError(f"not a frame of drafting messages: {error}") from error


def _plain(value):
    return value.astype("<i4").tobytes() if isinstance(value, np.ndarray) else value


def _message(kind: int, fields: list) -> Message:
    if not 0 <= kind < len(KINDS):
        raise ValueError(f"unknown message kind {kind}")
    message = KINDS[kind](*fields)
    for value, wanted in zip(message, KINDS[kind].__annotations__.values(), strict=True):
        known = bytes if wanted is np.ndarray else getattr(wanted, "__origin__", wanted)
        if not isinstance(value, known) or (known is list and not all(isinstance(token, int) for token in value)):
            raise ValueError(f"{KINDS[kind].__name__}: got {type(value).__name__} instead of {wanted}")
    if kind == 0:
        return message._replace(tokens=np.frombuffer(message.tokens, "<i4"))
    return message
