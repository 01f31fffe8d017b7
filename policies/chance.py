"""Chance without a generator: a fraction that is a function of ids alone (law 4)."""

from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=1 << 16)
def fraction(seed: int, name: str) -> float:
    """A number in [0, 1), uniform over names: the blake2b digest of (seed, name)."""
    digest = blake2b(f"{seed}\0{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / (1 << 56)
