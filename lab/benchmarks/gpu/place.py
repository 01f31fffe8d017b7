"""Where the steps of `gpu check` run: the device, the sizes that fit it, the folders that they may write.

Invariant: nothing here imports torch or vLLM; a step's process gets its Place as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]

CACHES = {"VLLM_CACHE_ROOT": "vllm-cache", "NUMBA_CACHE_DIR": "numba", "TRITON_CACHE_DIR": "triton"}
"""Folders of the room that keep what was compiled, so that a second call on the same machine starts quickly.

A dry run has the caches of every other process."""

QUIET = {
    "PYTHONUNBUFFERED": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # stock vLLM's too: the pack has no FlashInfer
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


MARK = ".tailrace-gpu"
"""A file that says that a folder is a room of ours."""


def claim(room: Path) -> str | None:
    """Makes a folder a room. Returns the reason, in one line, why it cannot be one, and changes nothing then."""
    if room.is_dir() and not (room / MARK).exists() and any(room.iterdir()):
        return "is there and is no room of this command; name an empty folder"
    room.mkdir(parents=True, exist_ok=True)
    (room / MARK).touch()
    return None


class Place(NamedTuple):
    """`room`: packages of the pack, models, caches. `out`: results. `card`: a GPU is there, else a dry run on CPUs.

    `small`: a tiny model and a few steps, which show that the chain works and nothing about speed.
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
        """The device of torch."""
        return "cuda" if self.card else "cpu"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.card else "float32"

    @property
    def site(self) -> Path:
        """The pack's packages, where a pack was unpacked."""
        return self.room / "site"

    @property
    def models(self) -> Path:
        return self.room / "models"

    def of(self, full, small):
        """One of two sizes."""
        return small if self.small else full

    def environment(self) -> dict[str, str]:
        """Returns the environment of a step's process."""
        paths = [str(self.site)] if self.site.is_dir() else []
        paths += [str(ROOT), os.environ.get("PYTHONPATH", "")]
        caches = {name: os.environ.get(name, str(self.room / folder)) for name, folder in CACHES.items() if self.card}
        return os.environ | QUIET | caches | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def command(self, step: str) -> list[str]:
        """Returns the command line of a step's process."""
        return [sys.executable, "-m", "tailrace.lab.benchmarks.gpu.steps", step, self.text()]


def libraries_of(site: Path) -> dict[str, str]:
    """Returns the setting with which Mooncake's client finds the libraries of the pack. Empty without them."""
    folder = site / "system"
    if not folder.is_dir():
        return {}
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))}
