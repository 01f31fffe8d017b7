"""The plan by which ranks write one version: every value is written once, by a rank that holds it.

Invariant: the pieces that are written are disjoint and fill every tensor. Equal pieces on several ranks are replicas;
the rank with the fewest bytes so far writes one. Called by the coordinator, on a thread.
"""

from collections.abc import Collection, Mapping
from math import prod

import numpy as np

from tailrace.deployments.messages.pieces import RankPlan, TensorForm, TensorPiece
from tailrace.deployments.staging.safetensors_header import ITEM_BYTES

Holders = dict[TensorPiece, list[tuple[int, int]]]
"""Ranks that hold a piece, each with the piece's place in its part."""


def plans_of(parts: Mapping[int, tuple[TensorPiece, ...]], away: Collection[int] = ()) -> dict[int, RankPlan]:
    """Returns each rank's plan. `away`: ranks on other nodes than the stage; of replicas they ship none that a rank
    there has. Raises ValueError, one line that names a rank or a tensor.
    """
    forms = _forms(parts)
    if not forms:
        raise ValueError("no rank has a tensor")
    by_tensor: dict[str, Holders] = {name: {} for name in forms}
    for rank, pieces in sorted(parts.items()):
        for place, piece in enumerate(pieces):
            by_tensor[piece.tensor.name].setdefault(piece, []).append((rank, place))
    for name, holders in by_tensor.items():
        _check(forms[name], holders)
    order = sorted(forms.values(), key=lambda form: (-ITEM_BYTES[form.kind], form.name))
    written: dict[int, list[int]] = {rank: [] for rank in parts}
    load = dict.fromkeys(parts, 0)
    for form in order:
        for piece, held in by_tensor[form.name].items():
            rank, place = min(held, key=lambda each: (each[0] in away, load[each[0]], each[0]))
            written[rank].append(place)
            load[rank] += piece.values * ITEM_BYTES[form.kind]
    return {rank: RankPlan(tuple(order), tuple(written[rank]), rank in away) for rank in parts}


def _forms(parts: Mapping[int, tuple[TensorPiece, ...]]) -> dict[str, TensorForm]:
    """Returns every tensor by name, as all ranks have it."""
    found: dict[str, tuple[int, TensorForm]] = {}
    for rank, pieces in sorted(parts.items()):
        for form in (piece.tensor for piece in pieces):
            first, known = found.setdefault(form.name, (rank, form))
            if known != form:
                raise ValueError(
                    f"rank {rank} has {form.name} as {form.kind} {list(form.shape)}, "
                    f"rank {first} as {known.kind} {list(known.shape)}"
                )
    return {name: form for name, (_, form) in found.items()}


def _check(form: TensorForm, holders: Holders) -> None:
    """Raises ValueError if pieces overlap, leave the tensor, or do not fill it."""
    pieces = list(holders)
    for piece in pieces:
        ends = (start + extent for start, extent in zip(piece.start, piece.extent, strict=True))
        if min(piece.start, default=0) < 0 or any(end > side for end, side in zip(ends, form.shape, strict=True)):
            raise ValueError(f"rank {holders[piece][0][0]} has a piece of {form.name} outside of {list(form.shape)}")
    if len(pieces) > 1 and (pair := _overlap(pieces)):
        one, other = (holders[piece][0][0] for piece in pair)
        raise ValueError(f"rank {one} and rank {other} hold different pieces of {form.name} that overlap")
    held, whole = sum(piece.values for piece in pieces), prod(form.shape)
    if held != whole:
        raise ValueError(f"no rank holds {whole - held:,} of the {whole:,} values of {form.name}")


def _overlap(pieces: list[TensorPiece]) -> tuple[TensorPiece, TensorPiece] | None:
    starts = np.array([piece.start for piece in pieces])
    ends = starts + np.array([piece.extent for piece in pieces])
    both = (starts[:, None] < ends[None]).all(-1)
    found = np.argwhere(np.triu(both & both.T, 1))
    return (pieces[found[0][0]], pieces[found[0][1]]) if len(found) else None
