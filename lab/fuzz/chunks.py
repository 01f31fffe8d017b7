"""Chunks in simulated engines: their tokens, and the names of the KV blocks of their contexts.

Invariant: tokens and names are functions of key, content and position alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, islice

import numpy as np

from tailrace.deployments.messages.adapters import digest_of as digest_of_adapter
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, KvPlan
from tailrace.deployments.messages.rollout import PromptLogprobs
from tailrace.kvpool.keys import PREFIX, block_name, cache_salt
from tailrace.lab.fuzz.token_law import EOS, TAIL, VOCABULARY, TokenLaw
from tailrace.policies.protocol.events import ChunkEnd

BLOCK_TOKENS = 16

KEY_PREFIX = f"{PREFIX}-0123456789abcdef"


def logprob_of(token: int | np.ndarray) -> float | np.ndarray:
    """Returns the logprob of a token, or of each token of an array, in any sample; exact in float32. The model's own
    logprob is twice that."""
    return -(1 + token) / 64


def reward_of(tokens: Iterable[int]) -> float:
    """Returns the reward of an answer, exact in float32."""
    return int.from_bytes(blake2b(np.array(tokens, np.int32).tobytes(), digest_size=2).digest()) / 64


@dataclass
class RunningChunk:
    """`content`: of the weights and adapter it runs under. `attempt`: name of this computation of the sample."""

    chunk: ChunkRequest
    content: str
    law: TokenLaw
    attempt: str
    cached_tokens: int = 0
    raises_at: int | None = None  # position whose token no step can make
    waited_steps: int = 0  # in a row, for the search of a culprit
    tokens: list[int] = field(default_factory=list)

    def possible(self, step_tokens: int) -> int:
        """Returns the number of tokens that a step may make."""
        return min(step_tokens, self.chunk.max_tokens - len(self.tokens))

    def ahead(self) -> Iterator[int]:
        """Yields the tokens that follow those made so far, without end."""
        tail, position = [*self.chunk.token_ids[-TAIL:], *self.tokens[-TAIL:]][-TAIL:], len(self.chunk.token_ids)
        for place in count(position + len(self.tokens)):
            token = self.law.draw(self.chunk.sample_key, self.content, place, tail, self.attempt)
            tail = [*tail, token][-TAIL:]
            yield token

    def is_fatal(self, step_tokens: int) -> bool:
        """Returns whether the next step raises because of this chunk."""
        if self.raises_at is None:
            return False
        start = len(self.chunk.token_ids) + len(self.tokens)
        if self.raises_at >= start + self.possible(step_tokens):
            return False
        return EOS not in islice(self.ahead(), max(0, self.raises_at - start))


def result_of(
    running: RunningChunk, tokens: np.ndarray, end: ChunkEnd, version: int, saved: list[bytes]
) -> ChunkResult:
    """Returns the result of a chunk that has ended. `version`: weights version. `saved`: names of its KV in the
    pool."""
    chunk = running.chunk
    return ChunkResult(
        chunk_id=chunk.chunk_id,
        token_ids=tokens,
        logprobs=logprob_of(tokens).astype(np.float32),
        raw_logprobs=2 * logprob_of(tokens).astype(np.float32),
        end=end,
        weights_version=version,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
        cached_tokens=running.cached_tokens,
        computed_tokens=len(chunk.token_ids) - running.cached_tokens,
        stored_tokens=BLOCK_TOKENS * len(saved),
        kv_names=b"".join(saved),
        sampling_mask=tuple((token, VOCABULARY) for token in running.tokens if chunk.sampling.sampling_mask),
        prompt_logprobs=prompt_logprobs(chunk) if chunk.scores_prompt else None,
    )


class Blocks:
    """Names of the KV blocks in an engine, the longest unused first. `capacity`: maximum number of names."""

    def __init__(self, capacity: int):
        self._names: dict[bytes, None] = {}
        self._capacity = capacity

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def keep(self, names: list[bytes]) -> None:
        """Keeps the blocks of a context. Removes the longest unused names beyond the capacity."""
        for name in names:
            self._names.pop(name, None)
            self._names[name] = None
        for name in list(self._names)[: max(0, len(self._names) - self._capacity)]:
            del self._names[name]

    def clear(self) -> None:
        self._names.clear()


def reserved_blocks(running: Iterable[RunningChunk], draft_tokens: int) -> int:
    """Returns the number of KV blocks that chunks need at their full length, with look-ahead."""
    needs = (len(one.chunk.token_ids) + one.chunk.max_tokens + draft_tokens for one in running)
    return sum(-(-need // BLOCK_TOKENS) for need in needs)


def prompt_logprobs(chunk: ChunkRequest) -> PromptLogprobs:
    count = len(chunk.token_ids) - 1
    return PromptLogprobs(logprobs=range(-1, -1 - count, -1), ranks=range(1, 1 + count), top=((),) * count)


def block_names(chunk: ChunkRequest, token_ids: np.ndarray) -> list[bytes]:
    """Returns the names of the whole blocks of a context, as vLLM's hashes give them: each covers all tokens up to its
    end."""
    kv = chunk.kv or KvPlan(chunk.weights_version, digest=chunk.weights_digest)
    salt = cache_salt(kv.version, kv.digest, digest_of_adapter(chunk.adapter))
    covered, names = blake2b(salt.encode(), digest_size=32), []
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        covered.update(token_ids[end - BLOCK_TOKENS : end].tobytes())
        names.append(block_name(kv.version, covered.digest()))
    return names


def pool_key(name: bytes) -> str:
    return f"{KEY_PREFIX}@{name.hex()}"
