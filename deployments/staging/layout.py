"""Places of tensors in the safetensors files of a stage, known before any of their bytes.

Invariant: the same tensors in the same order have the same places in every process.
"""

from collections.abc import Iterable
from math import prod

from tailrace.deployments.messages.pieces import TensorForm
from tailrace.deployments.staging.safetensors_header import HEADER_BYTES, ITEM_BYTES

ENTRY_BYTES = 160
"""Bytes of a tensor's entry in the header, besides its name twice and its shape: type, offsets, checksum,
punctuation.
"""


class FileLayout:
    """One file. `entries`: those of its header. `end`: bytes so far, with the header."""

    def __init__(self) -> None:
        self.entries: dict[str, dict] = {}
        self.end, self._header_bytes = HEADER_BYTES, ENTRY_BYTES

    def takes(self, form: TensorForm) -> bool:
        """Returns whether the tensor fits: into the header, and at an offset that suits its items."""
        fits = self._header_bytes + _entry_bytes(form) <= HEADER_BYTES - 8
        return fits and self.end % ITEM_BYTES[form.kind] == 0

    def place(self, form: TensorForm) -> int:
        """Adds a tensor. Returns its offset in the file."""
        offset = self.end
        self.end += prod(form.shape) * ITEM_BYTES[form.kind]
        places = [offset - HEADER_BYTES, self.end - HEADER_BYTES]
        self.entries[form.name] = {"dtype": form.kind, "shape": list(form.shape), "data_offsets": places}
        self._header_bytes += _entry_bytes(form)
        return offset

    def offset(self, name: str) -> int | None:
        """Returns a tensor's offset in the file, or None if it is in another one."""
        return HEADER_BYTES + self.entries[name]["data_offsets"][0] if name in self.entries else None


def layouts_of(tensors: Iterable[TensorForm]) -> list[FileLayout]:
    """Returns the files for these tensors, in order."""
    found: list[FileLayout] = []
    for form in tensors:
        if not found or not found[-1].takes(form):
            found.append(FileLayout())
        found[-1].place(form)
    return found


def file_name(number: int) -> str:
    return f"model-{number:05}.safetensors"


def _entry_bytes(form: TensorForm) -> int:
    return 2 * len(form.name.encode()) + 20 * len(form.shape) + ENTRY_BYTES
