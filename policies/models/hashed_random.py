"""Randomness without a generator: a fraction that is a function of ids alone (law 4)."""

from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=1 << 16)
def fraction(seed: int, name: str) -> float:
    """Returns a number in [0, 1), uniform over names: the blake2b digest of (seed, name)."""
    digest = blake2b(f"{seed}\0{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / (1 << 56)


@lru_cache(maxsize=1 << 12)
def eight_fractions(seed: int, block: int) -> tuple[float, ...]:
    """Returns eight numbers in [0, 1) from one digest, for draws by count: draw n is `[n % 8]` of block `n // 8`."""
    digest = blake2b(f"{seed}\0block\0{block}".encode(), digest_size=56).digest()
    return tuple(int.from_bytes(digest[i : i + 7], "little") / (1 << 56) for i in range(0, 56, 7))
