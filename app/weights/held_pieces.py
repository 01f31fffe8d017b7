"""Pieces of whole tensors that a rank of a trainer holds: shards of DTensors, slices of its own, whole tensors.

Nothing is gathered: offsets come from each tensor's placements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tailrace.app.weights.saved import COMPILED, bare_model
from tailrace.app.weights.saved_pieces import saved_pieces
from tailrace.deployments.messages.pieces import TensorForm, TensorPiece
from tailrace.deployments.staging.safetensors_header import TYPES
from tailrace.deployments.staging.stage import StageRefused, pairs_of


@dataclass(frozen=True)
class Slice:
    """A rank's part of a tensor that is no DTensor. `tensor`: its values. `shape`: shape of the whole. `start`: index
    in the whole of the part's first value.
    """

    tensor: object
    shape: tuple[int, ...]
    start: tuple[int, ...]


class HeldPiece(NamedTuple):
    """A piece, and this rank's values of it: a torch tensor or a numpy array."""

    piece: TensorPiece
    values: object


def held_pieces(held: object) -> list[HeldPiece]:
    """Returns the pieces that this rank holds. `held`: a model, a state dict, or (name, tensor) pairs. Those of a
    transformers model have the names of its saved folder, see `saved_pieces`.

    Raises StageRefused, one line, for a tensor of no known type, with unreduced values, or of other dimensions than its
    whole.
    """
    held = bare_model(held)
    pieces = (_held(name, value) for name, value in named_tensors(held))
    return [one for one in saved_pieces(held, pieces) if one.piece.values or not prod(one.piece.tensor.shape)]


def named_tensors(held: object) -> Iterator[tuple[str, object]]:
    """Yields names and tensors; of a model, tied weights once, under their first name, without torch.compile's parts of
    names.
    """
    if not hasattr(held, "state_dict"):
        yield from pairs_of(held)
        return
    seen: set[int] = set()
    for name, tensor in held.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name.replace(COMPILED, ""), tensor


def _held(name: str, value: object) -> HeldPiece:
    if isinstance(value, Slice):
        return _piece(name, value.tensor, tuple(value.shape), tuple(value.start))
    if hasattr(value, "placements"):
        return _shard(name, value)
    return _piece(name, value, tuple(value.shape), (0,) * len(value.shape))


def _shard(name: str, value) -> HeldPiece:
    """Returns a DTensor's shard on this rank."""
    if any(placement.is_partial() for placement in value.placements):
        raise StageRefused(f"tensor {name} is not reduced over its ranks; redistribute it first")
    (chunk,) = value.__create_chunk_list__()  # torch's own way for distributed checkpoints
    return _piece(name, value.to_local(), tuple(value.shape), tuple(chunk.offsets))


def _piece(name: str, values: object, shape: tuple[int, ...], start: tuple[int, ...]) -> HeldPiece:
    kind = TYPES.get(str(getattr(values, "dtype", None)).rpartition(".")[2])
    if kind is None:
        raise StageRefused(f"tensor {name} is a {type(values).__name__} of {getattr(values, 'dtype', 'no type')}")
    extent = tuple(values.shape)
    if not len(extent) == len(shape) == len(start):
        raise StageRefused(f"tensor {name}: a slice of {list(extent)} at {list(start)} is none of {list(shape)}")
    return HeldPiece(TensorPiece(TensorForm(name, kind, shape), start, extent), values)
