"""The actor that keeps a node's slots: it ends them with their application, and puts them into the pool on request.

One for each node that has slots, detached, as a trainer may end before the service. Invariant: no slot outlives its
application. Created by clients that stage and by replicas that pull; called by replicas of other nodes.
"""

import asyncio

import ray
from ray.actor import ActorHandle

from tailrace.deployments.staging.pool_copy import put
from tailrace.deployments.staging.slots import MemorySource, Slots
from tailrace.kvpool.pool import NAMESPACE, application_gone, detached_actor, join_pool
from tailrace.kvpool.pool_config import PoolConfig

NAME = "weights-of-"


class SlotKeeper:
    """See the module docstring."""

    def __init__(self, service: str, app_name: str):
        self._slots, self._app_name = Slots(service), app_name
        self._putting = asyncio.Lock()
        self._living = asyncio.get_running_loop().create_task(self._live())

    async def publish(self, source: MemorySource, pool: PoolConfig) -> bool:
        """Puts weights into the pool. Returns False if no slot here holds them. Raises PoolDown, or ValueError."""
        async with self._putting:
            folder = self._slots.held().get((source.version, source.digest))
            if folder is None:
                return False
            endpoint = await asyncio.to_thread(join_pool, pool, self._app_name)
            await asyncio.to_thread(put, source, folder, endpoint)
            return True

    async def _live(self) -> None:
        await application_gone(self._app_name)
        self._slots.remove()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def keep_slots(service: str, app_name: str) -> None:
    """Starts this node's keeper, and returns once it exists. Ray must be connected."""
    name = f"{NAME}{service}-{ray.get_runtime_context().get_node_id()}"
    detached_actor(SlotKeeper, name).remote(service, app_name)


def keepers(service: str) -> list[ActorHandle]:
    """Returns the keepers of a service, one for each node where weights were staged or pulled."""
    named = ray.util.list_named_actors(all_namespaces=True)
    found = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    return [ray.get_actor(name, NAMESPACE) for name in found if name.startswith(f"{NAME}{service}-")]
