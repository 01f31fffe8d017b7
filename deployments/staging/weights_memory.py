"""Weights in memory for the replicas of a node: its own slot, or a copy that is pulled from the pool into one.

Invariant: `fetch` returns once a slot of this node holds exactly these weights, verified by this process. Owned by the
engine replica, which calls it on a thread.
"""

from tailrace.deployments.staging.slots import MemorySource, slot_of
from tailrace.deployments.staging.verified import Verifier
from tailrace.kvpool.config import PoolConfig


class WeightsMemory:
    """`pool`: the application's, or None if there is none: then weights are on the nodes where they were staged."""

    def __init__(self, pool: PoolConfig | None, app_name: str):
        self._pool, self._app_name = pool, app_name
        self._verifier = Verifier()

    def fetch(self, source: MemorySource) -> None:
        """Raises ValueError, one line, if the weights cannot be had or are not those that were staged."""
        if (folder := slot_of(source)) is None:
            if self._pool is None:
                raise ValueError(
                    f"weights {source}: no slot of this node holds them, and there is no pool to pull from"
                )
            from tailrace.deployments.staging.pool_copy import pull

            folder = pull(source, self._pool, self._app_name)
        self._verifier.verify(folder, source)
