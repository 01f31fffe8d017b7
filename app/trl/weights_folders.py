"""Weights of a trainer, written to folders that every replica can read.

Two folders, by the parity of the version: if versions are consecutive, replicas that start late still read the last one
while the next is written. A folder appears by one rename, so it is whole or not there.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from tailrace.app.errors import BadInput

PART = "weights-part"
SHARD = "model-[0-9]{5}.safetensors"

MAX_SHARD_BYTES = 4 << 30
"""Maximum size of a shard, which is copied once on its way to disk: bounds the memory that the copy takes."""


class WeightsFolders:
    """`root`: a folder on storage that all nodes of the service see.

    Raises BadInput if something else has the name of a folder that is written here, and so removed.
    """

    def __init__(self, root: Path):
        self._root = Path(root).expanduser().resolve()
        for name in ("weights-0", "weights-1", PART):
            if (place := self._root / name).exists() and not _is_ours(place):
                raise BadInput(f"weights_dir {root}: {name} is there and is not of ours; give another folder")

    def write(self, version: int, tensors: Iterable[tuple[str, object]]) -> Path:
        """Writes (name, torch tensor) pairs as safetensors. Returns their folder. Raises OSError."""
        folder, part = self._root / f"weights-{version % 2}", self._root / PART
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        shard: dict[str, object] = {}
        held, shards = 0, 0
        for name, tensor in tensors:
            data = tensor.detach().to("cpu", copy=False).contiguous()
            size = data.numel() * data.element_size()
            if shard and held + size > MAX_SHARD_BYTES:
                _save(part, shards, shard)
                shard, held, shards = {}, 0, shards + 1
            shard[name], held = data, held + size
        _save(part, shards, shard)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        return folder


def _is_ours(folder: Path) -> bool:
    """Returns whether a folder holds nothing but shards."""
    return folder.is_dir() and all(re.fullmatch(SHARD, path.name) for path in folder.iterdir())


def _save(folder: Path, number: int, shard: dict[str, object]) -> None:
    from safetensors.torch import save_file

    save_file(shard, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
