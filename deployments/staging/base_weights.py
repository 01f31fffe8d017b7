"""The weights in a slot of this node, whose bytes are the base of deltas.

Invariant: a slot is whole, and is not written to while its node's lock is held. Called by the gateway for ranks that
upload.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path

from tailrace.deployments.messages.pieces import TensorForm, TensorPiece
from tailrace.deployments.staging.piece_files import PieceRuns
from tailrace.deployments.staging.safetensors_header import read_header


class BaseWeights:
    """`folder`: a slot, see `Slots.held`. Raises OSError or ValueError if it is not one any more."""

    def __init__(self, folder: Path):
        self._places: dict[TensorForm, tuple[mmap.mmap, int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            header, begin = read_header(path)
            header.pop("__metadata__")
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            for name, entry in header.items():
                form = TensorForm(name, entry["dtype"], tuple(entry["shape"]))
                self._places[form] = memory, begin + entry["data_offsets"][0]

    def has(self, tensors: Iterable[TensorForm]) -> bool:
        """Returns whether it has all these tensors, in these types and shapes."""
        return all(form in self._places for form in tensors)

    def read(self, piece: TensorPiece, begin: int, size: int) -> bytes:
        """Returns `size` bytes of a piece, from its byte `begin` on."""
        memory, offset = self._places[piece.tensor]
        runs, parts, end = PieceRuns(piece), [], begin + size
        while begin < end:
            run, inside = divmod(begin, runs.size)
            first, count = offset + runs[run] + inside, min(runs.size - inside, end - begin)
            parts.append(memory[first : first + count])
            begin += count
        return b"".join(parts)
