"""Unpacks a pack's archives, once and in parallel, on the machine that the pack was carried to. A pack with other bytes
replaces the one before.

Called by check.py on a bare Python 3.12, so only the standard library is imported here.
"""

import shutil
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path

ENDING = ".tar.xz"
PYTHON = (3, 12)
"""Version of Python that a pack's compiled packages are for, see scripts/gpu_pack/carried.py."""

CUDA_RUNTIME, CUDA_DRIVER = "libcudart.so.13", "libcuda.so.1"
DONE = "unpacked"
"""Name of the file in the room that says that all archives were unpacked, by their digests."""


def archives_of(pack: Path) -> list[Path]:
    return sorted(pack.glob(f"*{ENDING}"))


def unpack(pack: Path, room: Path) -> float | None:
    """Unpacks the archives into the room. Returns the seconds that this took, or None if these archives were unpacked
    before.
    """
    done, began_s, digests = room / DONE, time.monotonic(), digests_of(pack)
    if done.exists() and done.read_text() == digests:
        return None
    done.unlink(missing_ok=True)
    shutil.rmtree(room / "site", ignore_errors=True)
    room.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_unpack_one, archives_of(pack), [room] * len(archives_of(pack))))
    _link_cuda(room / "site" / "system")
    done.write_text(digests)
    return time.monotonic() - began_s


def digests_of(pack: Path) -> str:
    """Returns a line for each archive of the pack: the digest of its bytes, and its name."""
    lines = []
    for archive in archives_of(pack):
        with archive.open("rb") as file:
            lines.append(f"{file_digest(file, 'blake2b').hexdigest()} {archive.name}\n")
    return "".join(lines)


def _unpack_one(archive: Path, room: Path) -> None:
    with tarfile.open(archive, "r:xz") as file:
        for each in file:  # `extractall` could fail when two archives make the same folder at once
            (room / each.name).parent.mkdir(parents=True, exist_ok=True)
            file.extract(each, room, filter="tar")


def _link_cuda(system: Path) -> None:
    """Links this machine's CUDA libraries into the folder `system`, so that Mooncake's programs find them. The programs
    are started without LD_LIBRARY_PATH.
    """
    if not system.is_dir():
        return
    for name, library in ((CUDA_RUNTIME, _packaged(CUDA_RUNTIME)), (CUDA_DRIVER, loaded(CUDA_DRIVER))):
        if library is not None and not (system / name).is_symlink():
            (system / name).symlink_to(library)


def _packaged(name: str) -> Path | None:
    """Returns the path of a library in NVIDIA's packages, which come with torch, or None."""
    nvidia = find_spec("nvidia")
    places = [] if nvidia is None else nvidia.submodule_search_locations
    return next((library for place in places for library in Path(place).rglob(name)), None)


def loaded(name: str) -> Path | None:
    """Returns the file of a library that this process has loaded, or None."""
    stem = name.partition(".so")[0]
    paths = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    return next((Path(path) for path in paths if Path(path).name.startswith(f"{stem}.so")), None)
