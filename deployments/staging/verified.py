"""Verification of staged weights by a replica: every checksum is recomputed before anything is loaded.

Invariant: weights are loaded from a slot only after this process has found all its bytes as they were written. Called
by the engine replica, on a thread.
"""

import mmap
from pathlib import Path

from tailrace.deployments.staging.checksums import checksum, digest_of
from tailrace.deployments.staging.safetensors_header import read_header
from tailrace.deployments.staging.slots import MemorySource

Seen = tuple[tuple[int, int, int], ...]


class Verifier:
    """Remembers the slot that it verified last, by the identity of its files."""

    def __init__(self) -> None:
        self._seen: Seen = ()

    def verify(self, folder: Path, source: MemorySource) -> None:
        """Verifies a slot. Raises ValueError, one line, if a byte differs, a tensor is absent or a file is
        incomplete.
        """
        try:
            files = sorted(folder.glob("*.safetensors"))
            seen = tuple((stat.st_dev, stat.st_ino, stat.st_mtime_ns) for stat in (path.stat() for path in files))
            if files and seen == self._seen:
                return
            found: dict[str, str] = {}
            for path in files:
                found |= _checksums(path, source)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"weights {source}: {error}") from error
        if digest_of(found) != source.digest:
            raise ValueError(f"weights {source}: its tensors are not those that were staged")
        self._seen = seen


def _checksums(path: Path, source: MemorySource) -> dict[str, str]:
    header, begin = read_header(path)
    metadata = header.pop("__metadata__")
    found = {}
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
        memoryview(memory) as view,
    ):
        for name, entry in header.items():
            start, end = (begin + place for place in entry["data_offsets"])
            if end > len(view):
                raise ValueError(f"{path.name} ends before tensor {name}")
            with view[start:end] as data:
                found[name] = checksum(name, entry["dtype"], entry["shape"], data)
            if found[name] != metadata[f"blake3:{name}"]:
                raise ValueError(f"tensor {name} has another checksum than when it was staged")
    return found
