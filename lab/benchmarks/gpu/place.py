"""The place where the steps of `make gpu-check` run: the device, sizes that fit it, folders that steps write to.

Invariant: nothing here imports torch or vLLM. A step's process gets its Place as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]

CACHES = {"VLLM_CACHE_ROOT": "vllm-cache", "NUMBA_CACHE_DIR": "numba", "TRITON_CACHE_DIR": "triton"}
"""Names of the room's folders for compiled code, by environment variable: a second call on the same machine starts
quickly.

A variable that is set already keeps its value. A dry run uses the libraries' usual caches.
"""

QUIET = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # for stock vLLM too, since the pack has no FlashInfer
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


MARK = ".tailrace-gpu"
"""Name of the file that marks a folder as a room of this command."""


def claim(room: Path) -> str | None:
    """Makes a folder a room, and returns None. If the folder cannot be a room, changes nothing and returns the reason,
    in one line.
    """
    if room.is_dir() and not (room / MARK).exists() and any(room.iterdir()):
        return "is there and is no room of this command; name an empty folder"
    room.mkdir(parents=True, exist_ok=True)
    (room / MARK).touch()
    return None


class Place(NamedTuple):
    """`room`: folder of the pack's packages, models and caches. `out`: folder of results. `card`: whether a GPU is
    there; else the run is a dry run on CPUs.

    `small`: whether a tiny model and few steps are used. They show that all parts work together, and nothing about
    speed.
    """

    room: Path
    out: Path
    card: bool
    small: bool

    @classmethod
    def read(cls, text: str) -> "Place":
        room, out, card, small = json.loads(text)
        return cls(Path(room), Path(out), card, small)

    def text(self) -> str:
        return json.dumps([str(self.room), str(self.out), self.card, self.small])

    @property
    def device(self) -> str:
        """Name of torch's device."""
        return "cuda" if self.card else "cpu"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.card else "float32"

    @property
    def site(self) -> Path:
        """Folder of the pack's packages; it exists if a pack was unpacked."""
        return self.room / "site"

    @property
    def models(self) -> Path:
        return self.room / "models"

    def of(self, full, small):
        """Returns `small` in a small run, else `full`."""
        return small if self.small else full

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of a step's process."""
        paths = [str(self.site)] if self.site.is_dir() else []
        paths += [str(ROOT), os.environ.get("PYTHONPATH", "")]
        caches = {name: os.environ.get(name, str(self.room / folder)) for name, folder in CACHES.items() if self.card}
        return os.environ | QUIET | caches | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def command(self, step: str) -> list[str]:
        """Returns the command line of a step's process."""
        return [sys.executable, "-m", "tailrace.lab.benchmarks.gpu.steps", step, self.text()]


def libraries_of(site: Path) -> dict[str, str]:
    """Returns the environment variable by which Mooncake's client finds the pack's libraries; empty without
    the pack.
    """
    folder = site / "system"
    if not folder.is_dir():
        return {}
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))}
