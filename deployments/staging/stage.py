"""A version of weights that is being written into a slot: tensors copied one by one, then sealed with checksums.

Or `lay` makes the files, and ranks of a trainer write the pieces, see `piece_files`.

Invariant: a slot is renamed into place only when every tensor, checksum and header is written. An interruption before
that leaves a part folder, which the next stage removes. The caller's tensors are read in `add` alone, so it may change
them as soon as the last `add` has returned. Called by `app.calls`, and by a worker that receives
weights.
"""

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tailrace.deployments.messages.pieces import StagedPiece, TensorForm
from tailrace.deployments.staging.checksums import checksum, digest_of
from tailrace.deployments.staging.layout import FileLayout, file_name, layouts_of
from tailrace.deployments.staging.piece_files import unlike_piece
from tailrace.deployments.staging.safetensors_header import HEADER_BYTES, TYPES, header_block
from tailrace.deployments.staging.slots import MemorySource, Slots

Pieces = dict[str, list[StagedPiece]]
"""Pieces that ranks have written, by tensor."""


class StageRefused(ValueError):
    """The weights cannot be staged. The text is one line; the weights in use are untouched."""


class Stage:
    """Opens a part folder. `served`: version and digest whose slot is kept. `needed_bytes`: size of all tensors, or
    None.

    Raises AlreadyStaging, or StageRefused if there is not enough memory.
    """

    def __init__(self, slots: Slots, version: int, served: tuple[int, str], needed_bytes: int | None = None):
        self._slots, self._version = slots, version
        self._lock = slots.lock()
        try:
            self._slot = slots.free(served)
            for old in (slots.part, self._slot):
                shutil.rmtree(old, ignore_errors=True)
            self._check_room(needed_bytes)
            slots.part.mkdir(mode=0o700)
        except BaseException:  # any error: it is raised again
            os.close(self._lock)
            raise
        self._files: list[StagedFile] = []
        self._names: set[str] = set()
        self.staged_bytes = 0

    @property
    def tensors(self) -> int:
        return len(self._names)

    def add(self, name: str, tensor) -> None:
        """Copies a torch tensor, on any device, or a numpy array. Raises StageRefused."""
        if name in self._names:
            raise StageRefused(f"weights {self._version}: tensor {name} comes twice")
        kind, shape, data = as_bytes(name, tensor)
        form, size = TensorForm(name, kind, tuple(shape)), len(data)
        with room_for(self._slots, f"weights {self._version}: {name} needs {size:,} bytes after {self.staged_bytes:,}"):
            if not self._files or not self._files[-1].layout.takes(form):
                self._files.append(StagedFile(self._path(len(self._files)), FileLayout()))
            self._files[-1].write(form, data)
        self._names.add(name)
        self.staged_bytes += size

    def lay(self, tensors: Sequence[TensorForm]) -> None:
        """Makes the files for tensors whose pieces ranks write. Raises StageRefused if there is not enough memory."""
        layouts = layouts_of(tensors)
        self.staged_bytes = sum(layout.end - HEADER_BYTES for layout in layouts)
        self._check_room(self.staged_bytes)
        self._files = [StagedFile(self._path(number), layout) for number, layout in enumerate(layouts)]
        self._names = {form.name for form in tensors}

    def seal(self, pieces: Sequence[StagedPiece] = ()) -> MemorySource:
        """Writes checksums and headers, and puts the slot in place. Returns the source to commit.

        No other stage may begin until `drop`: it would take this slot while the replicas check it. `pieces`: those
        that ranks have written. Raises StageRefused if the bytes of one are not the rank's.
        """
        if not self._files:
            raise StageRefused(f"weights {self._version}: no tensor was given")
        found: dict[str, str] = {}
        by_tensor: Pieces = {}
        for staged in pieces:
            by_tensor.setdefault(staged.piece.tensor.name, []).append(staged)
        for file in self._files:
            found |= file.checksums(by_tensor)
        source = MemorySource(self._slots.service, self._version, digest_of(found))
        for file in self._files:
            file.seal(source)
        self._slots.part.rename(self._slot)
        return source

    def drop(self) -> None:
        """Discards the tensors so far, and lets the next stage begin; a sealed slot is kept."""
        if self._lock >= 0:
            shutil.rmtree(self._slots.part, ignore_errors=True)
        self._close()

    def __del__(self):
        if hasattr(self, "_files"):  # else the constructor has failed
            self.drop()

    def _close(self) -> None:
        for file in self._files:
            file.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, number: int) -> Path:
        return self._slots.part / file_name(number)

    def _check_room(self, needed_bytes: int | None) -> None:
        root, free = self._slots.root, shutil.disk_usage(self._slots.root).free
        needed_bytes = 0 if needed_bytes is None else needed_bytes + HEADER_BYTES
        if needed_bytes > free:
            raise StageRefused(
                f"weights {self._version}: {needed_bytes:,} bytes are needed, and {root} has {free:,} free; give the "
                "machine more shared memory, or send a folder"
            )


class StagedFile:
    """One safetensors file whose header is written last."""

    def __init__(self, path: Path, layout: FileLayout):
        self.layout = layout
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._file, 0, HEADER_BYTES)
        self._checksums: dict[str, str] = {}

    def write(self, form: TensorForm, data: memoryview) -> None:
        """Writes a tensor. Raises OSError; memory is reserved first, so a copy never ends half-way for lack of it."""
        size, place = len(data), self.layout.place(form)
        if size:
            os.posix_fallocate(self._file, place, size)
        done = 0
        while done < size:
            done += os.pwrite(self._file, data[done : done + (1 << 30)], place + done)

    def checksums(self, pieces: Pieces) -> dict[str, str]:
        """Returns the checksum of every tensor here, computed from the bytes that were written. Raises StageRefused,
        see `Stage.seal`.
        """
        os.ftruncate(self._file, self.layout.end)
        with mmap.mmap(self._file, self.layout.end, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
            for name, entry in self.layout.entries.items():
                begin, end = (HEADER_BYTES + place for place in entry["data_offsets"])
                with view[begin:end] as data:
                    self._checksums[name] = checksum(name, entry["dtype"], entry["shape"], data)
                    for staged in pieces.get(name, ()):
                        if unlike_piece(staged, self._checksums[name], data):
                            raise StageRefused(f"rank {staged.rank}: {staged.piece} is staged with other bytes")
        return self._checksums

    def seal(self, source: MemorySource) -> None:
        metadata = {"format": "pt", "version": str(source.version), "digest": source.digest}
        metadata |= {f"blake3:{name}": value for name, value in self._checksums.items()}
        os.pwrite(self._file, header_block({"__metadata__": metadata} | self.layout.entries), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextlib.contextmanager
def room_for(slots: Slots, what: str) -> Iterator[None]:
    """Raises StageRefused in place of the error that memory is used up. `what`: version, and bytes that are needed."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(slots.root).free
        raise StageRefused(
            f"{what}, and {slots.root} has {free:,} free; give the machine more shared memory, or send a folder"
        ) from None


def bytes_of(tensors) -> int | None:
    """Returns the size of all tensors in bytes, or None if they come from an iterator that can be read once."""
    if not hasattr(tensors, "__len__"):
        return None
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        return sum(tensor.nbytes for _, tensor in pairs_of(tensors))
    return None


def pairs_of(tensors):
    """Returns (name, tensor) pairs of a mapping, a list of pairs or an iterator."""
    return tensors.items() if hasattr(tensors, "items") else tensors


def as_bytes(name: str, tensor) -> tuple[str, list[int], memoryview]:
    """Returns type, shape and bytes of a tensor, which is copied only if it is on a device or not contiguous."""
    kind = TYPES.get(str(getattr(tensor, "dtype", None)).rpartition(".")[2])
    if kind is None:
        raise StageRefused(f"tensor {name} is a {type(tensor).__name__} of {getattr(tensor, 'dtype', 'no type')}")
    shape = list(tensor.shape)
    if hasattr(tensor, "detach"):
        import torch

        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        flat = full.detach().to("cpu").contiguous().reshape(-1)
        array = flat.view(torch.uint8).numpy() if flat.numel() else flat.to(torch.uint8).numpy()
    else:
        import numpy as np

        array = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return kind, shape, memoryview(array)
