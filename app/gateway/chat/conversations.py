"""Token ids of answers that conversations may return to: a bounded memory by a digest of their messages.

An answer's text, encoded again, may have other tokens than were generated. A request whose messages begin with an
earlier conversation therefore gets its original token ids. Invariant: this is never required; a conversation that was
dropped, or was answered by another replica, is encoded again. Called by `Chat`, from any thread.
"""

import json
import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
from cachetools import LRUCache

from tailrace.deployments.features.wire import PlaceholderSpan


class AnsweredTurn(NamedTuple):
    """A conversation up to an answer. `token_ids`: int32, its prompt and the answer. `closing`: the last token if it
    ends the answer, or None. `spans`: placeholders of its images.
    """

    token_ids: np.ndarray
    closing: int | None
    spans: tuple[PlaceholderSpan, ...] = ()


class AnsweredTurns(Protocol):
    """Turns by the digest of their messages."""

    def keep(self, digest: bytes, turn: AnsweredTurn) -> None: ...

    def find(self, digest: bytes) -> AnsweredTurn | None: ...


class Conversations:
    """`max_tokens`: maximum over all turns; the least recently used are dropped."""

    def __init__(self, max_tokens: int):
        self._turns: LRUCache[bytes, AnsweredTurn] = LRUCache(max_tokens, lambda turn: len(turn.token_ids))
        self._lock = threading.Lock()

    def keep(self, digest: bytes, turn: AnsweredTurn) -> None:
        if len(turn.token_ids) <= self._turns.maxsize:
            with self._lock:
                self._turns[digest] = turn

    def find(self, digest: bytes) -> AnsweredTurn | None:
        with self._lock:
            return self._turns.get(digest)


def digest_of(template: Mapping) -> bytes:
    """Returns the digest of a conversation without messages. `template`: arguments of the chat template."""
    return blake2b(_text(template), digest_size=16).digest()


def digest_after(digest: bytes, message: Mapping) -> bytes:
    """Returns the digest of a conversation with one more message."""
    return blake2b(digest + _text(message), digest_size=16).digest()


def _text(value: Mapping) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
