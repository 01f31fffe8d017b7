"""The archives of a pack: which archive has which file, their sizes, and the limit of all archives together."""

import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from gpu_pack.carried import ALONE, LIMIT_BYTES, VLLM

ENDING = ".tar.xz"
AT_ONCE = 2


class Archive(NamedTuple):
    """An archive: its name, its bytes (`packed`), and the bytes of the files in it (`plain`)."""

    name: str
    packed: int
    plain: int


class TooLarge(Exception):
    """The archives exceed the limit; the text names the largest archives."""


def archive_of(path: str) -> str:
    """Returns the name of the archive of a file, given by its path in the site folder."""
    for part, name in ALONE.items():
        if part in path:
            return name
    folder = path.split("/", maxsplit=1)[0]
    if folder.startswith(("mooncake", "system")):
        return "pool"
    return VLLM if folder.startswith(VLLM) else "packages"


def foreign_files(out: Path) -> list[str]:
    """Returns the names of files in a folder that belong to no pack."""
    return sorted(path.name for path in out.iterdir() if not path.name.endswith(ENDING)) if out.is_dir() else []


def pack(room: Path, out: Path) -> Iterator[Archive]:
    """Packs all files below `room`/site into `out`, in place of the archives there. Yields each archive once it is
    written, the largest first.
    """
    parts: dict[str, list[Path]] = {}
    for path in sorted((room / "site").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            parts.setdefault(archive_of(path.relative_to(room / "site").as_posix()), []).append(path)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"*{ENDING}"):
        old.unlink()
    largest_first = sorted(parts.items(), key=lambda part: -sum(path.stat().st_size for path in part[1]))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        yield from threads.map(lambda part: _pack_one(room, out, *part), largest_first)


def _pack_one(room: Path, out: Path, name: str, files: list[Path]) -> Archive:
    path = out / f"{name}{ENDING}"
    with tarfile.open(path, "w:xz", preset=6) as tar:
        for file in files:
            tar.add(file, file.relative_to(room), filter=_anonymous)
    return Archive(name, path.stat().st_size, sum(file.stat().st_size for file in files))


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Removes owner and time, so that the same content always gives the same bytes."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def check_size(archives: list[Archive], limit: int = LIMIT_BYTES) -> int:
    """Returns the bytes of all archives. Raises TooLarge if they exceed `limit`."""
    total = sum(one.packed for one in archives)
    if total > limit:
        largest = sorted(archives, key=lambda one: -one.packed)[:3]
        names = ", ".join(f"{one.name} {one.packed / 2**20:.1f}" for one in largest)
        raise TooLarge(f"the pack has {total / 2**20:.1f} MiB, {limit / 2**20:.0f} are allowed; largest: {names} MiB;"
                       " add to LEFT_OUT in scripts/gpu_pack/carried.py")  # fmt: skip
    return total


def table(archives: list[Archive]) -> str:
    """Returns a table of the sizes in MiB, with one archive a line and the sum of all."""
    lines = [f"{'archive':20}{'packed':>8}{'plain':>8}  MiB"]
    rows = [*archives, Archive("all", sum(a.packed for a in archives), sum(a.plain for a in archives))]
    return "\n".join(lines + [f"{name:20}{packed / 2**20:8.1f}{plain / 2**20:8.1f}" for name, packed, plain in rows])
