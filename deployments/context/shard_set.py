"""The set of shards, by epoch, and the shard that each prompt belongs to.

Invariant: a prompt's file depends on its key alone, and a file's shard on the number of shards alone. Two shards never
differ by two files or more, and a change of the number moves only files of shards that come or go. Rendezvous hashing
moves as few, but spreads 16 files unevenly. Read by shards, engines and the coordinator.
"""

from functools import cache
from hashlib import blake2b
from typing import NamedTuple

FILES = 16
EVERY = range(FILES)


class ShardSet(NamedTuple):
    """Shards 0 to `shards` - 1. The greater of two sets is the newer; only shard 0 makes new ones."""

    epoch: int
    shards: int


class Moved(NamedTuple):
    """Answer of a shard that has done nothing, because the prompt belongs to another shard in this set."""

    to: ShardSet


def file_of(prompt_key: str) -> int:
    """Returns the number of a prompt's file, 0 to FILES - 1."""
    return blake2b(prompt_key.encode(), digest_size=1).digest()[0] % FILES


def shard_of(prompt_key: str, shards: int) -> int:
    """Returns the index of a prompt's shard, 0 to shards - 1."""
    return shard_with(file_of(prompt_key), shards)


def shard_with(file: int, shards: int) -> int:
    """Returns the owner of a file."""
    return _owners(shards)[file]


def shards_files(shard: int, shards: int) -> frozenset[int]:
    """Returns the numbers of the files that a shard owns."""
    return frozenset(file for file, owner in enumerate(_owners(shards)) if owner == shard)


@cache
def _owners(shards: int) -> tuple[int, ...]:
    """Returns the shard of each file. The last shard takes its files from those with most files."""
    if shards == 1:
        return (0,) * FILES
    files = list(_owners(shards - 1))
    for _ in range(FILES // shards):
        fullest = max(range(shards - 1), key=lambda shard: (files.count(shard), -shard))
        files[max(file for file in EVERY if files[file] == fullest)] = shards - 1
    return tuple(files)
