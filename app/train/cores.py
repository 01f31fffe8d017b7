"""The cores that a trainer computes on where it shares them with engines.

A gradient runs on the cores of replicas that have nothing to run, and on all once no sample is under way. The number
of threads stays the same, so the bits do too. Linux; used by `GroupTrainer` before each backward pass.
"""

import os
import time
from contextlib import suppress

from tailrace.app.client import RolloutClient
from tailrace.app.train.feed.step_feed import StepFeed

LOOK_S = 0.2
"""Between two looks for a free core: a tenth of a backward pass."""


class SharedCores:
    """`client`: of the service whose replicas may have chunks to run."""

    def __init__(self, client: RolloutClient):
        import ray

        self._client = client
        self._node_id = ray.get_runtime_context().get_node_id()
        self._all = frozenset(os.sched_getaffinity(0))
        self.waited_s = 0.0  # since the caller set it to 0

    def take(self, feed: StepFeed) -> None:
        """Returns once a core is free, with this process bound to the free ones."""
        started = time.monotonic()
        while not (free := self._all if feed.is_idle else self._free()):
            time.sleep(LOOK_S)
        self.waited_s += time.monotonic() - started
        bind(free)

    def release(self) -> None:
        """Bind this process to all its cores again."""
        bind(self._all)

    def _free(self) -> frozenset[int]:
        status = self._client.status_blocking()
        here = [replica for replica in status.replicas if replica.node_id == self._node_id and replica.ready]
        return self._all.difference(*(replica.cores for replica in here if replica.running))


def bind(cores: frozenset[int]) -> None:
    """Let every thread of this process run on these cores alone."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended in the meantime
            os.sched_setaffinity(thread, cores)
