"""The engines' own counts, summed over all replicas that have ever joined.

Invariant: a sum never goes down while the coordinator lives: a replica that has left stays in it with its last report.
A replica's counts begin with its process, and its name is new then. Called by `Books`.
"""

from collections import Counter
from collections.abc import Mapping

from tailrace.deployments.messages.chunk import EngineStats
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
        self._last: dict[str, EngineStats] = {}
        self._loaded: dict[str, tuple[int, str]] = {}  # by replica: the weights whose load is in `weights_s`

    def learn(self, reports: Mapping[str, EngineStats]) -> None:
        """Adds the latest report of each replica."""
        for name, report in reports.items():
            before = self._last.pop(name, None)  # so that departed replicas come first
            if before is not report:
                self._add(report, before)
            self._last[name] = report
        gone = [name for name in self._last if name not in reports]
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._last[name]
            self._loaded.pop(name, None)

    def _add(self, report: EngineStats, before: EngineStats | None) -> None:
        earlier = {} if before is None else before.work
        if report.work != earlier:
            for kind, count in report.work.items():
                if count != (known := earlier.get(kind, 0)):
                    self.work[kind] += count - known
        self.work[PREEMPTIONS] += report.preemptions - (0 if before is None else before.preemptions)
        steps = self.steps
        for place, count in enumerate(report.step_counts):
            steps.counts[place] += count - (before.step_counts[place] if before and before.step_counts else 0)
        steps.sum = self.work[STEP_US] / 1e6
        loaded = report.weights_version, report.weights_digest
        if report.weights_pause_s and self._loaded.get(report.replica_id) != loaded:
            self._loaded[report.replica_id] = loaded
            self.weights_s.add(report.weights_pause_s)
