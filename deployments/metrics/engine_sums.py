"""The engines' own counts, summed over all replicas that have ever joined.

Invariant: a sum never goes down while the coordinator lives: a replica that has left stays in it with its last report.
A replica's counts begin with its process, and its name is new then. Called by `ServiceCollector`.
"""

from collections import Counter
from collections.abc import Iterable

from tailrace.deployments.messages.status import ReplicaStatus
from tailrace.deployments.metrics.metric import Distribution
from tailrace.deployments.metrics.registry import STEP_SECONDS, WEIGHTS_SECONDS

MAX_GONE = 64
"""Departed replicas whose counts are kept separately, in case they return; older ones are summed."""

STEP_US = "step_us"
PREEMPTIONS = "preemptions"


class EngineSums:
    """`work`: as in `EngineStats`. `steps` and `weights_s`: steps by duration, and loads of weights."""

    def __init__(self):
        self.work: Counter[str] = Counter()
        self.steps = Distribution(STEP_SECONDS.bounds)
        self.weights_s = Distribution(WEIGHTS_SECONDS.bounds)
        self._last: dict[str, ReplicaStatus] = {}

    def learn(self, replicas: Iterable[ReplicaStatus]) -> None:
        """Adds the latest report of each replica; one that has sent none is left out."""
        present = set()
        for replica in replicas:
            if replica.observed_s is not None:
                present.add(replica.replica_id)
                before = self._last.pop(replica.replica_id, None)  # so that departed replicas come first
                self._add(replica, before)
                self._last[replica.replica_id] = replica
        gone = [name for name in self._last if name not in present]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._last[name]

    def _add(self, replica: ReplicaStatus, before: ReplicaStatus | None) -> None:
        earlier = {} if before is None else before.work
        if replica.work != earlier:
            for kind, count in replica.work.items():
                if count != (known := earlier.get(kind, 0)):
                    self.work[kind] += count - known
        self.work[PREEMPTIONS] += replica.preemptions - (0 if before is None else before.preemptions)
        for place, count in enumerate(replica.step_counts):
            self.steps.counts[place] += count - (before.step_counts[place] if before and before.step_counts else 0)
        self.steps.sum = self.work[STEP_US] / 1e6
        pause_s = replica.weights_pause_s  # of its last load: another one has another pause
        if pause_s and pause_s != (0.0 if before is None else before.weights_pause_s):
            self.weights_s.add(pause_s)
