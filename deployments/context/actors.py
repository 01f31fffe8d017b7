"""Actors of the group context: named, detached, one per shard. Coordinator and engines get them by `ensure_context`.

Invariant: they outlive every replica, and none outlives the application. An application with another configuration has
other actors, and ends the former ones. An actor that dies is started again, with its history on disk. Shard 0 starts
the others, on its own node, where history may be on a disk.
"""

import asyncio
from contextlib import suppress
from hashlib import blake2b

import ray
from ray.actor import ActorHandle

from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.shard import ContextShard
from tailrace.deployments.context.shard_handles import NoShard
from tailrace.kvpool.pool import NAMESPACE, application_gone, detached_actor


def ensure_context(config: ContextConfig, app_name: str) -> "Shards":
    """Returns the application's shards after it has started shard 0, which starts the others; does not wait for them.

    They are started on this node, and restarted there while the node lives: history may be on its disk.
    """
    shards = Shards(config, app_name)
    shards.start(0)
    return shards


class Shards:
    """Handles of an application's shards, found by name. Any thread may call."""

    def __init__(self, config: ContextConfig, app_name: str):
        self._config, self._app_name = config, app_name
        self._handles: dict[int, ActorHandle] = {}

    def at(self, index: int) -> ActorHandle:
        """Returns the handle of a shard. Raises NoShard."""
        handle = self._handles.get(index)
        if handle is None:
            try:
                handle = self._handles[index] = ray.get_actor(self._name(index), NAMESPACE)
            except ValueError as error:
                raise NoShard(self._name(index)) from error
        return handle

    def start(self, index: int) -> None:
        """Starts a shard on this node, unless it exists."""
        if index not in self._handles:
            actor = detached_actor(ShardActor, self._name(index), soft=True)
            self._handles[index] = actor.remote(self._config, index, self._app_name)

    def lose(self, index: int) -> None:
        """Drops the handle of a shard that does not answer: another actor may have its name by now."""
        self._handles.pop(index, None)

    def _name(self, index: int) -> str:
        return f"{_family(self._config, self._app_name)}-{index}"


class ShardActor(ContextShard):
    """A ContextShard that ends with its application. Shard 0 ends the shards of another configuration."""

    def __init__(self, config: ContextConfig, index: int, app_name: str):
        super().__init__(config, index)
        self._others = Shards(config, app_name)
        if index == 0:
            for other in range(1, config.shards):
                self._others.start(other)
        work = self._live_with(app_name, index, _family(config, app_name))
        self._living = asyncio.get_running_loop().create_task(work)

    async def _live_with(self, app_name: str, index: int, family: str) -> None:
        if index == 0:
            await asyncio.to_thread(_end_others, app_name, family)
        await application_gone(app_name)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _family(config: ContextConfig, app_name: str) -> str:
    return f"{app_name}-context-{blake2b(config.model_dump_json().encode(), digest_size=4).hexdigest()}"


def _end_others(app_name: str, family: str) -> None:
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if actor["namespace"] == NAMESPACE and name.startswith(f"{app_name}-context-") and not name.startswith(family):
            with suppress(ValueError):  # it has ended since it was listed
                ray.kill(ray.get_actor(name, NAMESPACE))
