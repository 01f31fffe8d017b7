"""The time and kind of each fault: a function of the seed. Called by lab/soak/run.py."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

GAP_S = (20.0, 60.0)
"""Min and max seconds between two faults."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault at `at_s`, seconds since the start. `place`: from 0 to below 1, chooses among victims."""

    at_s: float
    kind: str
    place: float


def chance(seed: int, *ids: object) -> float:
    """Returns a number from 0 to below 1, by a digest of the seed and the ids."""
    digest = blake2b("\0".join(map(str, (seed, *ids))).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / (1 << 56)


def strikes(seed: int, seconds: float, kinds: Sequence[str], gap_s: tuple[float, float] = GAP_S) -> Iterator[Strike]:
    """Yields the faults of a soak. Every kind comes once in each round, in another order each time."""
    at_s, number = 0.0, 0
    while True:
        turn = number // len(kinds)
        for _, kind in sorted((chance(seed, "order", turn, kind), kind) for kind in kinds):
            at_s += gap_s[0] + chance(seed, "gap", number) * (gap_s[1] - gap_s[0])
            if at_s >= seconds:
                return
            yield Strike(at_s, kind, chance(seed, "place", number))
            number += 1
