"""Weights in memory for the replicas of a node: its own slot, or a copy pulled from the pool into a slot.

Invariant: `fetch` returns once a slot of this node holds exactly these weights, verified by this process. Owned by the
engine replica, which calls it on a thread.
"""

from tailrace.deployments.staging.slots import MemorySource, service_name, slot_of
from tailrace.deployments.staging.verified import Verifier
from tailrace.kvpool.pool_config import PoolConfig


class WeightsMemory:
    """`pool`: the application's pool, or None: then weights exist only on the nodes where they were staged."""

    def __init__(self, pool: PoolConfig | None, app_name: str):
        self._pool, self._app_name = pool, app_name
        self._verifier = Verifier()

    def own_slots(self) -> str:
        """Returns the name of the service's slots, and starts the keeper of this node's slots."""
        import ray

        from tailrace.deployments.staging.keeper import keep_slots

        service = service_name(self._app_name, ray.get_runtime_context().gcs_address)
        keep_slots(service, self._app_name)
        return service

    def fetch(self, source: MemorySource) -> None:
        """Brings weights into a slot of this node. Raises ValueError, one line, if they cannot be found or differ from
        those that were staged.
        """
        if (folder := slot_of(source)) is None:
            if self._pool is None:
                raise ValueError(
                    f"weights {source}: no slot of this node holds them, and there is no pool to pull from"
                )
            from tailrace.deployments.staging.pool_copy import pull

            self.own_slots()  # else what is pulled outlives the application
            folder = pull(source, self._pool, self._app_name, verifier=self._verifier)
        self._verifier.verify(folder, source)
