"""Counts of KV events by cause: plain integers that add up over ranks, steps and replicas.

Invariant: a count never goes down; nothing is dropped silently. Names are `EVENT` or `EVENT.CAUSE`; latencies fall into
buckets `EVENT_ms.N`: took N milliseconds or less, N a power of two. Written by the connector, read by the replica.
"""

from collections import Counter
from threading import Lock


class Counts:
    """A counter that threads share; `take` returns the counts since its last call."""

    def __init__(self):
        self._new: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, name: str, amount: int = 1) -> None:
        if amount:
            with self._lock:
                self._new[name] += amount

    def took(self, what: str, seconds: float) -> None:
        """Counts one operation of this duration in its bucket."""
        self.add(f"{what}_ms.{bucket_ms(seconds)}")

    def take(self) -> Counter[str]:
        with self._lock:
            taken, self._new = self._new, Counter()
        return taken


def bucket_ms(seconds: float) -> int:
    """Returns the smallest power of two, in milliseconds, that is not below the duration; 1 or more."""
    return 1 << max(0, int(seconds * 1000 - 1e-9)).bit_length()
