"""Seconds of engine replicas during a step: up, idle, given back. From the service's status, on a thread.

Replicas are counted once a second; busy seconds are the engines' own sums of step times.
"""

import threading
import time
from collections.abc import Sequence

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.status import ReplicaStatus

LOOK_S = 1.0
"""Seconds between two readings: a replica that is given back stays away for longer."""


class ReplicaSeconds:
    """Seconds between two calls of `take`."""

    def __init__(self, client: RolloutClient):
        self._client = client
        self._lock = threading.Lock()
        self._busy: dict[str, float] = {}
        self._sums = [0.0, 0.0, 0.0]  # up, busy, given back
        self._up = 0
        self.most = 0  # replicas that were up together, at most
        self._at = time.monotonic()
        self._look()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="replica-seconds")
        self._thread.start()

    @property
    def given_back(self) -> int:
        """Number of replicas that are not up now, of the maximum that were up together."""
        with self._lock:
            return self.most - self._up

    def take(self) -> tuple[float, float, float]:
        """Returns seconds of replicas (up, idle, given back) since the last call.

        Given back: replicas that are not up, of the maximum that were up together.
        """
        self._look()
        with self._lock:
            (up, busy, given_back), self._sums = self._sums, [0.0, 0.0, 0.0]
        return up, max(0.0, up - busy), given_back

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:  # from the reading on: an older one that is counted later would count busy seconds twice
            self._count(self._client.status_blocking().replicas, time.monotonic())

    def _count(self, replicas: Sequence[ReplicaStatus], now: float) -> None:
        passed, self._at = now - self._at, now
        busy = {replica.replica_id: busy_s(replica) for replica in replicas}
        if self.most:
            self._sums[0] += passed * len(replicas)
            self._sums[1] += sum(max(0.0, seconds - self._busy.get(name, seconds)) for name, seconds in busy.items())
            self._sums[2] += passed * max(0, self.most - len(replicas))
        self._busy, self._up, self.most = busy, len(replicas), max(self.most, len(replicas))


def busy_s(replica: ReplicaStatus) -> float:
    """Returns the seconds in engine steps since the replica started."""
    return replica.work.get("step_us", 0) / 1e6
