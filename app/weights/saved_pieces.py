"""Pieces of a transformers model's parameters under the names, and in the shapes, of its saved folder.

Transformers joins tensors as it loads them: all experts of a layer become one parameter. A piece of such a parameter is
cut into pieces of the saved tensors. They are views of the same memory: nothing is gathered or copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tailrace.app.weights.saved import conversions_of
from tailrace.deployments.staging.stage import StageRefused

if TYPE_CHECKING:  # it imports this file
    from tailrace.app.weights.held_pieces import HeldPiece

ANY = "*"
"""In a name by transformers: the number of an expert."""


def saved_pieces(held: object, pieces: Iterable[HeldPiece]) -> Iterator[HeldPiece]:
    """Yields the pieces of a model's parameters as pieces of saved tensors; those of anything else as they are.

    Raises StageRefused, one line, for a parameter that transformers makes in another way than by joining.
    """
    conversions = [one.reverse_transform() for one in reversed(conversions_of(held))]
    converters = [one for one in conversions if hasattr(one, "operations")]
    renamings = [one for one in conversions if not hasattr(one, "operations")]
    for piece in pieces:
        for one in _parted(piece, converters):
            name = one.piece.tensor.name
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            yield _as(one, name=name)


def _parted(piece: HeldPiece, converters: list) -> list[HeldPiece]:
    """Returns the pieces of the tensors that a parameter is joined of. `converters`: of them, at most one knows it."""
    for converter in converters:
        name, known = converter.rename_source_key(piece.piece.tensor.name)
        if known is not None:
            parts = [_as(piece, name=name)]
            for operation in converter.operations:
                parts = [each for part in parts for each in _undone(operation, converter.target_patterns, part)]
            return parts
    return [piece]


def _undone(operation: object, targets: list[str], part: HeldPiece) -> Iterator[HeldPiece]:
    """Yields what one step of transformers' way to save makes of a piece, whose name has the first of the targets."""
    name, kind = part.piece.tensor.name, type(operation).__name__
    if kind == "Chunk" and operation.num_shards_attribute is None:
        size = part.piece.tensor.shape[operation.dim] // len(targets)
        for number, target in enumerate(targets):
            yield from _within(part, operation.dim, number * size, size, name.replace(targets[0], target))
    elif kind == "SplitModulelist" and ANY in name:
        for number in range(part.piece.tensor.shape[operation.dim]):
            yield from _at(part, operation.dim, number, name.replace(ANY, str(number), 1))
    else:
        raise StageRefused(f"transformers saves {name} by {kind}, which is not known for parts of it; send it whole")


def _within(part: HeldPiece, dim: int, first: int, size: int, name: str) -> Iterator[HeldPiece]:
    """Yields the piece of the tensor that has `size` places along a dimension, from `first` on, if any is held."""
    start, end = part.piece.start[dim], part.piece.start[dim] + part.piece.extent[dim]
    low, high = max(start, first), min(end, first + size)
    if low < high:
        values = part.values.narrow(dim, low - start, high - low)
        yield _as(
            part,
            name=name,
            values=values,
            shape=_with(part.piece.tensor.shape, dim, size),
            start=_with(part.piece.start, dim, low - first),
        )


def _at(part: HeldPiece, dim: int, place: int, name: str) -> Iterator[HeldPiece]:
    """Yields the piece of the tensor at a place of a dimension, which it does not have, if that is held."""
    start, extent = part.piece.start[dim], part.piece.extent[dim]
    if start <= place < start + extent:
        yield _as(
            part,
            name=name,
            values=part.values.select(dim, place - start),
            shape=_with(part.piece.tensor.shape, dim),
            start=_with(part.piece.start, dim),
        )


def _as(part: HeldPiece, name: str, values=None, shape=None, start=None) -> HeldPiece:
    """Returns a piece of another tensor, with what is given."""
    values = part.values if values is None else values
    tensor = part.piece.tensor._replace(name=name, shape=part.piece.tensor.shape if shape is None else shape)
    start = part.piece.start if start is None else start
    piece = part.piece._replace(tensor=tensor, start=start, extent=tuple(values.shape))
    return part._replace(piece=piece, values=values)


def _with(numbers: tuple[int, ...], dim: int, *other: int) -> tuple[int, ...]:
    """Returns the numbers with another one, or none, for a dimension."""
    return (*numbers[:dim], *other, *numbers[dim + 1 :])
