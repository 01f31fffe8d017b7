"""The file that each prompt's history belongs to, and the shard that owns each file.

Invariant: a prompt's file depends on its key alone, and a file's shard on the number of shards alone. Read by shards,
engines and the coordinator.
"""

from hashlib import blake2b

FILES = 16
EVERY = range(FILES)


def file_of(prompt_key: str) -> int:
    """Returns the number of a prompt's file, 0 to FILES - 1."""
    return blake2b(prompt_key.encode(), digest_size=1).digest()[0] % FILES


def shard_of(prompt_key: str, shards: int) -> int:
    """Returns the index of a prompt's shard, 0 to shards - 1."""
    return file_of(prompt_key) % shards


def shards_files(shard: int, shards: int) -> frozenset[int]:
    """Returns the numbers of the files that a shard owns."""
    return frozenset(range(shard, FILES, shards))
