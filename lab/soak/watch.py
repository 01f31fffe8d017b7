"""The service as its status shows it during a soak: tokens per second, silence, contained errors.

A coordinator that was killed counts from 0 again; the errors of the next ones are added. Called by lab/soak/run.py.
"""

from collections import Counter

from tailrace.deployments.messages.status import ServiceSnapshot

RATE_S = 5.0
"""Seconds of one point of the curve of tokens per second."""


class ServiceWatch:
    """Takes one status after the other."""

    def __init__(self):
        self.rates: list[tuple[float, float]] = []  # seconds since the start, tokens per second
        self._longest_silence_s = 0.0
        self.contained: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()  # of calls for the status, by kind of error
        self._seen: dict[str, int] = {}  # contained errors of the present coordinator
        self._batches: dict[str, int] = {}  # tokens of each batch, as last seen; a lost coordinator's come back
        self._made, self._since_s, self._last_token_s = 0, 0.0, 0.0

    def miss(self, error: Exception) -> None:
        """Records a call for the status that gave none."""
        self.failures[type(error).__name__] += 1

    def longest_silence_s(self, at_s: float) -> float:
        """Returns the longest time without a new token, also if it lasts at this moment."""
        return max(self._longest_silence_s, at_s - self._last_token_s)

    def look(self, at_s: float, status: ServiceSnapshot) -> None:
        batches = {batch.batch_id: batch.tokens for batch in status.batches}
        new = sum(max(0, tokens - self._batches.get(name, 0)) for name, tokens in batches.items())
        if new:
            self._longest_silence_s = self.longest_silence_s(at_s)
            self._last_token_s = at_s
        self._batches |= batches
        self._made += new
        if at_s - self._since_s >= RATE_S:
            self.rates.append((at_s, self._made / (at_s - self._since_s)))
            self._made, self._since_s = 0, at_s
        if any(status.contained.get(name, 0) < count for name, count in self._seen.items()):
            self._seen = {}  # another coordinator
        self.contained += Counter(status.contained) - Counter(self._seen)
        self._seen = dict(status.contained)
