"""The group context's actors: named, detached, one per shard. Coordinator and engines come to them by `ensure_context`.

Invariant: they outlive every replica and none outlives the application; an application with another configuration
has other actors, and ends the former ones. One that dies is started again, with its history on disk.
"""

import asyncio
from hashlib import blake2b

import ray
from ray.actor import ActorHandle

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.shard import ContextShard
from tailrace.kvpool.pool import NAMESPACE, application_gone, detached_actor


def ensure_context(config: ContextConfig, app_name: str) -> list[ActorHandle]:
    """Handles of the application's shards, in order, started where there are none; does not wait for them.

    Started on this node and, while it lives, started again there: history may lie on its disk.
    """
    family = _family(config, app_name)
    return [
        detached_actor(ShardActor, f"{family}-{index}", soft=True).remote(config, index, app_name)
        for index in range(config.shards)
    ]


class ShardActor(ContextShard):
    """A ContextShard that ends with its application."""

    def __init__(self, config: ContextConfig, index: int, app_name: str):
        super().__init__(config, index)
        work = self._live_with(app_name, _family(config, app_name))
        self._living = asyncio.get_running_loop().create_task(work)

    async def _live_with(self, app_name: str, family: str) -> None:
        await asyncio.to_thread(_end_others, app_name, family)
        await application_gone(app_name)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _family(config: ContextConfig, app_name: str) -> str:
    return f"{app_name}-context-{blake2b(config.model_dump_json().encode(), digest_size=4).hexdigest()}"


def _end_others(app_name: str, family: str) -> None:
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(f"{app_name}-context-") and not name.startswith(family):
            ray.kill(ray.get_actor(name, NAMESPACE))
