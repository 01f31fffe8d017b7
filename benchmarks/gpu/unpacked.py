"""The pack on the machine that it was carried to: its archives unpacked once, side by side.

Called by check.py, on a bare Python 3.12: only the standard library is here.
"""

import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ENDING = ".tar.xz"
PYTHON = (3, 12)
"""Whose compiled packages are in a pack; scripts/gpu_pack/carried.py."""

CUDA_RUNTIME = "libcudart.so.13"
DONE = "unpacked"
"""A file of the room that says that all archives were unpacked."""


def archives_of(pack: Path) -> list[Path]:
    return sorted(pack.glob(f"*{ENDING}"))


def unpack(pack: Path, room: Path) -> float | None:
    """Unpacks the archives into the room. Returns the seconds, or None if that was done before."""
    if (room / DONE).exists():
        return None
    began_s = time.monotonic()
    room.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_unpack_one, archives_of(pack), [room] * len(archives_of(pack))))
    _link_cuda_runtime(room / "site" / "system")
    (room / DONE).touch()
    return time.monotonic() - began_s


def _unpack_one(archive: Path, room: Path) -> None:
    with tarfile.open(archive, "r:xz") as file:
        file.extractall(room, filter="tar")


def _link_cuda_runtime(system: Path) -> None:
    """Has Mooncake's programs find the CUDA runtime that came with torch."""
    link, nvidia = system / CUDA_RUNTIME, find_spec("nvidia")
    if not system.is_dir() or link.is_symlink() or nvidia is None:
        return
    for place in nvidia.submodule_search_locations:
        for library in Path(place).rglob(CUDA_RUNTIME):
            link.symlink_to(library)
            return
