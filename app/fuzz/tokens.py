"""Tokens of simulated engines and names of the KV blocks of a context: functions of key, content and position alone."""

from functools import lru_cache
from hashlib import blake2b

import numpy as np

from tailrace.deployments.messages.adapters import digest_of as digest_of_adapter
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan
from tailrace.kvpool.keys import PREFIX, block_name, cache_salt

VOCABULARY, EOS = 1000, 0
BLOCK_TOKENS = 16
PIECE = 16
"""Tokens that one hash gives."""

KEY_PREFIX = f"{PREFIX}-0123456789abcdef"


@lru_cache(maxsize=1 << 14)
def _piece(key: int, digest: str, index: int, mean_tokens: int) -> tuple[int, ...]:
    raw = blake2b(f"{key}/{digest}/{index}".encode(), digest_size=4 * PIECE).digest()
    drawn = np.frombuffer(raw, np.uint32)
    return tuple(np.where(drawn % mean_tokens == 0, EOS, 1 + drawn % (VOCABULARY - 1)).tolist())


def token_at(key: int, digest: str, position: int, mean_tokens: int) -> int:
    """Returns the token at a position of the sample `key`, prompt included, under weights of content `digest`."""
    return _piece(key, digest, position // PIECE, mean_tokens)[position % PIECE]


def block_names(chunk: ChunkRequest, token_ids: np.ndarray) -> list[bytes]:
    """Names of the whole blocks of a context, as vLLM's hashes give them: each covers all tokens up to its end."""
    kv = chunk.kv or KvPlan(chunk.weights_version, digest=chunk.weights_digest)
    salt = cache_salt(kv.version, kv.digest, digest_of_adapter(chunk.adapter))
    covered, names = blake2b(salt.encode(), digest_size=32), []
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        covered.update(token_ids[end - BLOCK_TOKENS : end].tobytes())
        names.append(block_name(kv.version, covered.digest()))
    return names


def pool_key(name: bytes) -> str:
    return f"{KEY_PREFIX}@{name.hex()}"
