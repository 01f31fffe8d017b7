"""The codec of the product's sockets: tagged messages as MessagePack, numpy arrays among them, no executable content.

Invariant: `decode` returns a well-formed message or raises ValueError, one line.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

DTYPES = ("<i4", "<f4", "<i8", "|u1", "<u2")
"""Types of arrays in messages. An array is encoded as the index of its type, its bytes, and further dimensions."""


class WireMessage(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A message: encoded as its class's name and its fields, in order."""


def plain(value: Any) -> Any:
    """Returns a value without a MessagePack type as one that has one. Raises TypeError for other types, and ValueError
    for an array of a type that is none of DTYPES.
    """
    if isinstance(value, np.ndarray):
        return DTYPES.index(value.dtype.str), np.ascontiguousarray(value).reshape(-1).data.cast("B"), *value.shape[1:]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not carried by a socket")


def made(kind: type, value: Any) -> Any:
    """Returns the array of an encoded one. Raises TypeError for other types."""
    if kind is np.ndarray:
        place, data, *shape = value
        return np.frombuffer(data, DTYPES[place]).reshape(-1, *shape)
    raise TypeError(f"{kind.__name__} is not carried by a socket")


class Codec:
    """`messages`: the type of a frame. `strict`: refuses a whole float where an int is promised. `plain`, `made`:
    convert values of further types, see above. `extension`: makes a value of a MessagePack extension's code and data.
    """

    def __init__(
        self,
        messages: Any,
        strict: bool = True,
        plain: Callable[[Any], Any] = plain,
        made: Callable[[type, Any], Any] = made,
        extension: Callable[[int, memoryview], Any] | None = None,
    ):
        self._encoder = msgspec.msgpack.Encoder(enc_hook=plain)
        self._decoder = msgspec.msgpack.Decoder(messages, dec_hook=made, strict=strict, ext_hook=extension)

    def encode(self, messages: Any) -> bytes:
        """Returns one frame. Raises TypeError or ValueError if a value is of no known type, or too large."""
        try:
            return self._encoder.encode(messages)
        except OverflowError as error:
            raise ValueError("a number has more than 64 bits; give a smaller one") from error

    def decode(self, frame: bytes) -> Any:
        """Returns what a frame holds. Raises ValueError."""
        try:
            return self._decoder.decode(frame)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, msgspec.MsgspecError) as error:
            raise ValueError(" ".join(str(error).split())) from error
