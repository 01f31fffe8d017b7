"""Pieces of tensors in the files of a stage: each rank writes its own, straight to their places in the whole tensors.

A piece is a number of runs of equal length; a shard of the first dimension is one. Called by ranks, and by the stage.
"""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

from tailrace.deployments.messages.pieces import StagedPiece, TensorForm, TensorPiece
from tailrace.deployments.staging.checksums import checksum
from tailrace.deployments.staging.layout import file_name, layouts_of
from tailrace.deployments.staging.safetensors_header import ITEM_BYTES


class PieceFiles:
    """The files of a stage, for a rank that writes pieces. `tensors`: those of the plan, in order."""

    def __init__(self, part: Path, tensors: Sequence[TensorForm]):
        self._layouts = layouts_of(tensors)
        paths = [part / file_name(number) for number in range(len(self._layouts))]
        self._files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for path in paths]

    def write(self, piece: TensorPiece, data: memoryview, begin: int = 0) -> None:
        """Writes bytes of a piece, from its byte `begin` on. Raises OSError; memory is reserved first."""
        for file, layout in zip(self._files, self._layouts, strict=True):
            if (offset := layout.offset(piece.tensor.name)) is not None and data:
                _write(file, offset, piece, data, begin)

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def unlike_piece(staged: StagedPiece, whole: str, data: memoryview) -> bool:
    """Returns whether a staged piece differs from its rank's own. `whole`, `data`: checksum and bytes of the tensor."""
    piece = staged.piece
    if piece.is_whole:
        return staged.end.checksum != whole
    runs = PieceRuns(piece)
    return staged.end.checksum != checksum_of_piece(piece, *(data[offset : offset + runs.size] for offset in runs))


def bytes_of(piece: TensorPiece) -> int:
    """Returns the number of a piece's bytes."""
    return piece.values * ITEM_BYTES[piece.tensor.kind]


def checksum_of_piece(piece: TensorPiece, *data: memoryview) -> str:
    """Returns the checksum of a piece's bytes, in one or more parts; a whole tensor's is that of `checksum`."""
    return checksum(str(piece), piece.tensor.kind, list(piece.extent), *data)


class PieceRuns:
    """Offsets of a piece's runs in the whole tensor, in bytes. `size`: bytes of each."""

    def __init__(self, piece: TensorPiece):
        shape, start, extent = piece.tensor.shape, piece.start, piece.extent
        item = ITEM_BYTES[piece.tensor.kind]
        last = len(shape)  # the dimensions from here on are whole
        while last and extent[last - 1] == shape[last - 1]:
            last -= 1
        outer = max(0, last - 1)  # the dimensions before this one are walked, and the rest is one run
        strides = [prod(shape[place + 1 :]) * item for place in range(len(shape))]
        self._first = sum(begin * stride for begin, stride in zip(start, strides, strict=True))
        self._walks = [range(0, extent[place] * strides[place], strides[place]) for place in range(outer)]
        self.size = prod(extent[outer:]) * item

    def __len__(self) -> int:
        return prod(map(len, self._walks))

    def __getitem__(self, number: int) -> int:
        if number >= len(self):
            raise IndexError(number)
        offset = self._first
        for walk in reversed(self._walks):
            number, place = divmod(number, len(walk))
            offset += walk[place]
        return offset


def _write(file: int, offset: int, piece: TensorPiece, data: memoryview, begin: int) -> None:
    """`offset`: of the tensor in the file. `begin`: of `data` in the piece."""
    runs, end = PieceRuns(piece), begin + len(data)
    reserved = runs[begin // runs.size] + begin % runs.size
    last = runs[(end - 1) // runs.size] + (end - 1) % runs.size
    os.posix_fallocate(file, offset + reserved, last + 1 - reserved)
    done = 0
    while done < len(data):
        run, inside = divmod(begin + done, runs.size)
        part = data[done : done + min(runs.size - inside, 1 << 30)]
        done += os.pwrite(file, part, offset + runs[run] + inside)
