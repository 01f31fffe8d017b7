"""The law of simulated tokens: a function of key, weights and position, or at exactness `law` one with noise.

With noise a token depends on the tokens before it, too, and at a share of positions two candidates are so close that
each attempt to compute the sample takes one of them. A chunk that continues other tokens than those handed out shows
at once, and so does a token of other weights. Used by the simulated engines and by the checks of results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np

VOCABULARY, EOS = 1000, 0
PIECE = 16
"""Tokens that one hash gives."""

TAIL = 4
"""Tokens before a position on which its candidates depend, with noise."""


@lru_cache(maxsize=1 << 14)
def _piece(key: int, digest: str, index: int, mean_tokens: int) -> tuple[int, ...]:
    raw = blake2b(f"{key}/{digest}/{index}".encode(), digest_size=4 * PIECE).digest()
    drawn = np.frombuffer(raw, np.uint32)
    return tuple(np.where(drawn % mean_tokens == 0, EOS, 1 + drawn % (VOCABULARY - 1)).tolist())


def token_at(key: int, digest: str, position: int, mean_tokens: int) -> int:
    """Returns the token at a position of the sample `key`, prompt included, under weights of content `digest`."""
    return _piece(key, digest, position // PIECE, mean_tokens)[position % PIECE]


def _bits(text: str) -> tuple[int, int, int]:
    raw = blake2b(text.encode(), digest_size=12).digest()
    return tuple(int.from_bytes(raw[at : at + 4], "little") for at in (0, 4, 8))


@dataclass(frozen=True)
class TokenLaw:
    """`mean_tokens`: of an answer. `noise`: share of positions at which two candidates are close; 0 at `bits`."""

    mean_tokens: int
    noise: float = 0.0

    def candidates(self, key: int, digest: str, position: int, before: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens that may be drawn at a position, one or two. `before`: all tokens before it, or the last
        TAIL of them.
        """
        if not self.noise:
            return (token_at(key, digest, position, self.mean_tokens),)
        tail = ",".join(str(int(token)) for token in before[-TAIL:])
        first, second, close = _bits(f"{key}/{digest}/{position}/{tail}")
        return tuple(map(self._token, (first, second) if close < self.noise * 2**32 else (first,)))

    def draw(self, key: int, digest: str, position: int, before: Sequence[int], attempt: str) -> int:
        """Returns the token that an attempt draws, such as a chunk on a replica."""
        found = self.candidates(key, digest, position, before)
        return found[0] if len(found) == 1 else found[_bits(f"{attempt}/{position}")[0] % 2]

    def _token(self, drawn: int) -> int:
        return EOS if drawn % self.mean_tokens == 0 else 1 + drawn % (VOCABULARY - 1)
