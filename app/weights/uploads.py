"""What a rank sends of each piece that it uploads: its bytes, or deltas on what it sent before.

Invariant: a base is what the service has loaded from this rank, to the byte. Called by `HttpWeights`.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np

from tailrace.deployments.messages.pieces import TensorPiece
from tailrace.deployments.staging.deltas import WINDOW_BYTES, delta_of

Item = TypeVar("Item")

MOST_PARTS = 32
"""Maximum number of parts in one request, whose address names each: about 3 KB, which proxies take."""


class Body(NamedTuple):
    """Bytes of a piece to send: where in the piece they begin, and whether they are a delta."""

    begin: int
    data: bytes | memoryview
    is_delta: bool


class Part(NamedTuple):
    """Bytes of one piece in a request. `number`: of the piece. `checksum`: of the whole piece."""

    number: int
    checksum: str
    body: Body

    def query(self) -> list[tuple[str, object]]:
        """Returns the fields of the request's address for this part."""
        begin, data, is_delta = self.body
        of_piece = [("number", self.number), ("checksum", self.checksum)]
        return [*of_piece, ("begin", begin), ("delta", is_delta), ("size", len(data))]


def packed(items: Iterable[Item], size_of: Callable[[Item], int], most_bytes: int) -> Iterator[list[Item]]:
    """Yields items that go together, in order: at most so many bytes, if one item does not have more, and at most
    MOST_PARTS. `size_of`: returns the bytes of an item.
    """
    together, total = [], 0
    for item in items:
        size = size_of(item)
        if together and (total + size > most_bytes or len(together) == MOST_PARTS):
            yield together
            together, total = [], 0
        together.append(item)
        total += size
    if together:
        yield together


def whole_bodies(data: memoryview, size: int, first: int = 0) -> Iterator[Body]:
    """Yields bytes as they are, at most `size` in a body. `first`: where in the piece they begin."""
    for begin in range(0, max(1, len(data)), size):  # an empty tensor has one body, too
        yield Body(first + begin, data[begin : begin + size], False)


class SentPieces:
    """A copy of the pieces that this rank sent last, in host memory. `loaded`: version and digest of the weights that
    they are parts of, or None: they are no base.
    """

    def __init__(self) -> None:
        self.loaded: tuple[int, str] | None = None
        self._copies: dict[TensorPiece, np.ndarray] = {}

    def bodies(self, piece: TensorPiece, data: memoryview, size: int, deltas: bool) -> Iterator[Body]:
        """Yields a piece's bodies of at most `size` bytes, and remembers it. `deltas`: they are taken."""
        before = self._copies.get(piece)
        if before is None or not deltas:
            yield from whole_bodies(data, size)
        else:
            for begin in range(0, max(1, len(data)), WINDOW_BYTES):
                yield from _window(memoryview(before)[begin:], data[begin : begin + WINDOW_BYTES], size, begin)
        self._copies[piece] = np.array(data, np.uint8) if before is None else _copied(before, data)


def _window(before: memoryview, data: memoryview, size: int, begin: int) -> Iterator[Body]:
    """Yields the delta of some bytes, or themselves where it is larger than half of them."""
    delta, half = delta_of(before[: len(data)], data), len(data) // 2
    if len(delta) > half:
        yield from whole_bodies(data, size, begin)
    elif len(delta) <= size:
        yield Body(begin, delta, True)
    else:
        yield from _window(before, data[:half], size, begin)
        yield from _window(before[half:], data[half:], size, begin + half)


def _copied(into: np.ndarray, data: memoryview) -> np.ndarray:
    into[:] = np.frombuffer(data, np.uint8)
    return into
