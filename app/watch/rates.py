"""Rates of a service over its last readings: tokens per second, tokens per step, accepted drafts.

A replica that restarts counts from 0; a counter that fell gives no rate until the window has passed.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.deployments.messages.status import ServiceSnapshot

WINDOW_S = 5.0
"""Seconds over which rates are computed. A chunk's drafts are counted as it ends, so a shorter window would jump."""


class Look(NamedTuple):
    at_s: float
    status: ServiceSnapshot


@dataclass(frozen=True, slots=True)
class ReplicaRates:
    """`tokens_per_step`: tokens of one sample per step, 1 without drafts. `accepted`: share of the drafted tokens by
    source, of chunks that ended in the window. Each is None while nothing is known of it.
    """

    tokens_per_s: float | None = None
    tokens_per_step: float | None = None
    accepted: Mapping[str, float] | None = None


class Rates:
    """Call `add` in order of time, then read."""

    def __init__(self):
        self._looks: deque[Look] = deque()

    def add(self, at_s: float, status: ServiceSnapshot) -> None:
        """Adds a reading. `at_s`: seconds of any clock that only grows."""
        self._looks.append(Look(at_s, status))
        while len(self._looks) > 2 and at_s - self._looks[1].at_s >= WINDOW_S:
            self._looks.popleft()

    @property
    def _window_s(self) -> float:
        return self._looks[-1].at_s - self._looks[0].at_s

    def batch(self, batch_id: str) -> float | None:
        """Returns a batch's tokens per second; None before its second reading."""
        tokens = [_tokens_of(look.status, batch_id) for look in (self._looks[0], self._looks[-1])]
        if None in tokens or not self._window_s:
            return None
        return max(0, tokens[1] - tokens[0]) / self._window_s

    def replica(self, replica_id: str) -> ReplicaRates:
        first, last = (_work_of(look.status, replica_id) for look in (self._looks[0], self._looks[-1]))
        if first is None or last is None or not self._window_s:
            return ReplicaRates()
        made = Counter({name: count - first.get(name, 0) for name, count in last.items()})
        if min(made.values(), default=0) < 0:
            return ReplicaRates()
        sources = [name.removeprefix("drafted.") for name in made if name.startswith("drafted.") and made[name]]
        return ReplicaRates(
            tokens_per_s=made["tokens"] / self._window_s,
            tokens_per_step=made["tokens"] / made["verifications"] if made["verifications"] else None,
            accepted={name: made[f"accepted.{name}"] / made[f"drafted.{name}"] for name in sources} or None,
        )

    def service(self) -> float | None:
        """Returns the tokens per second of all replicas whose rate is known; None if there is none."""
        replicas = self._looks[-1].status.replicas
        known = [self.replica(replica.replica_id).tokens_per_s for replica in replicas]
        return sum(rate for rate in known if rate is not None) if any(rate is not None for rate in known) else None


def _tokens_of(status: ServiceSnapshot, batch_id: str) -> int | None:
    return next((batch.tokens for batch in status.batches if batch.batch_id == batch_id), None)


def _work_of(status: ServiceSnapshot, replica_id: str) -> Mapping[str, int] | None:
    return next((replica.work for replica in status.replicas if replica.replica_id == replica_id), None)
