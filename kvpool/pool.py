"""Access to the pool: the coordinator by `ensure_pool`, an engine replica by `join_pool`.

The pool's actors are named and detached: one master for the application, which moves if its node is lost, and one store
for each node with an engine, bound to it. Invariant: none outlives the application. The master checks whether Serve has
the application and otherwise ends itself; a store ends when its master is gone for good. A store leaves when no engine
has been on its node for LEASE_S, see `Departures`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tailrace.kvpool.master import KvMaster
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.kvpool.programs import free_port
from tailrace.kvpool.status import MasterAnswer, PoolDown, StoreNodeStatus
from tailrace.kvpool.store_node import KvStoreNode

logger = logging.getLogger(__name__)

NAMESPACE = "tailrace"
JOIN_S, CALL_S = 60.0, 1.0
LOOK_S = 5.0
"""Seconds between two checks; each actor of the application checks by itself, and each check is a call of Serve's
controller.
"""
LEASE_S = 12 * LOOK_S
"""Seconds without a renewal by an engine after which a store leaves."""
GONE_LOOKS = 2
"""Number of looks in a row that must find the application missing."""


def ensure_pool(config: PoolConfig, app_name: str) -> ActorHandle:
    """Returns the handle of the application's KvMaster, started on this node if there is none; does not wait for it.

    Its methods raise PoolDown, or RayActorError while the actor itself is unreachable.
    """
    host, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
    return detached_actor(MasterActor, master_name(config, app_name), soft=True).remote(
        config, app_name, node_id, free_port(host), free_port(host)
    )


def join_pool(config: PoolConfig, app_name: str) -> PoolEndpoint:
    """Returns the endpoint once master and this node's store are up and this node's memory is mounted; waits up to
    JOIN_S, and as long again if the store leaves meanwhile.

    Blocks; may be called on a thread with an event loop. Raises PoolDown, in one line.
    """
    host = ray.util.get_node_ip_address()
    try:
        return _endpoint(config, app_name)
    except PoolDown as error:
        raise PoolDown(str(error.cause if isinstance(error, RayError) else error)) from None
    except (RayError, TimeoutError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise PoolDown(f"no pool memory on {host}: {line}") from None


def _endpoint(config: PoolConfig, app_name: str) -> PoolEndpoint:
    until_s = time.monotonic() + JOIN_S
    while True:
        call = _own_store(config, app_name).endpoint.remote(JOIN_S, _holder())
        try:
            return call.future().result(JOIN_S + CALL_S)
        except ActorDiedError:  # the store was leaving, and has ended: the next one has its name
            if time.monotonic() > until_s:
                raise
            time.sleep(CALL_S)


def _holder() -> str:
    """Returns the name of this process in a store's leases."""
    return ray.get_runtime_context().get_worker_id()


async def follow_pool(
    config: PoolConfig, app_name: str, joined: PoolEndpoint, rejoin: Callable[[str], Awaitable[None]]
) -> None:
    """Calls `rejoin` with the master's address whenever it has changed, and keeps this node's store. Runs until
    cancelled.

    The master starts on another node once its own is lost. A failed call is repeated after LOOK_S.
    """
    store, address = _own_store(config, app_name), joined.master_address
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            now = (await store.endpoint.remote(CALL_S, _holder(), LEASE_S)).master_address
            if now != address:
                await rejoin(now)
                address = now
        except ActorDiedError:  # it left, as this process had been silent for too long
            store = _own_store(config, app_name)
        except (PoolDown, RayError, RuntimeError) as error:
            logger.warning("pool of %s: %s", app_name, (str(error).splitlines() or [type(error).__name__])[0])


def _own_store(config: PoolConfig, app_name: str) -> ActorHandle:
    """Returns the handle of this node's store, started if there is none."""
    master = ensure_pool(config, app_name)
    host, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
    name = f"{master_name(config, app_name)}-store-{node_id}"
    return detached_actor(StoreActor, name).remote(config, node_id, master, host, free_port(host))


def master_name(config: PoolConfig, app_name: str) -> str:
    """Returns the name of the master. Another configuration is another pool: an application that is deployed again does
    not continue the old one.
    """
    digest = blake2b(config.model_dump_json().encode(), digest_size=4).hexdigest()
    return f"{app_name}-kv-{digest}"


def detached_actor(kind: type, name: str, soft: bool = False):
    """Returns an actor class that creates or finds the actor of this name, restarted for ever, on this node; `soft`:
    once the node is gone, on another.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=soft)
    return ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        enable_task_events=False,  # as Serve's own actors: each call's events would go to the GCS, for lists of tasks
        memory=1,  # bytes: Ray 2.60 ignores a soft affinity of an actor that asks for nothing
        scheduling_strategy=here,
    )


class MasterActor(KvMaster):
    """A KvMaster that ends with its application, and ends the pools of the application's former configurations.

    The ports are those of the node that it is made for; on another node it takes others.
    """

    def __init__(self, config: PoolConfig, app_name: str, node_id: str, rpc_port: int, pages_port: int):
        host = ray.util.get_node_ip_address()
        if node_id != ray.get_runtime_context().get_node_id():
            rpc_port, pages_port = free_port(host), free_port(host)
        super().__init__(config, host, rpc_port, pages_port)
        self._living = asyncio.get_running_loop().create_task(self._live(app_name, master_name(config, app_name)))

    async def _live(self, app_name: str, name: str) -> None:
        await asyncio.to_thread(_end_others, app_name, name)
        await application_gone(app_name)
        await self.stop()
        _end_actor()


class StoreActor(KvStoreNode):
    """A KvStoreNode that ends with its master, or when it has left."""

    def __init__(self, config: PoolConfig, node_id: str, master: ActorHandle, host: str, port: int):
        self._master = master
        address = master.where.remote().future().result()
        super().__init__(config, node_id, address, host, port, self._to_master)
        self._living = asyncio.get_running_loop().create_task(self._live())

    async def _to_master(self, status: StoreNodeStatus, segment: str) -> MasterAnswer | None:
        try:
            return await self._master.report.remote(status, segment)
        except ActorDiedError:
            raise
        except RayError:  # it is being restarted
            return None

    async def _live(self) -> None:
        with suppress(ActorDiedError):
            await self.run()
        await self.stop()
        _end_actor()


async def application_gone(app_name: str) -> None:
    """Returns once GONE_LOOKS checks in a row, LOOK_S apart, have not found the application."""
    looks_left = GONE_LOOKS
    while looks_left:
        await asyncio.sleep(LOOK_S)
        looks_left = GONE_LOOKS if await asyncio.to_thread(application_exists, app_name) else looks_left - 1


def application_exists(app_name: str) -> bool:
    """Returns whether Serve has the application, in whatever state; True too while Serve's controller does not answer.

    Its handle is requested first: Serve's whole status takes ten times the processor time, here and in the controller.
    """
    try:
        with suppress(RayServeException):  # none, or not built yet
            serve.get_app_handle(app_name)
            return True
        return app_name in serve.status().applications
    except ActorDiedError:  # for good: Serve was shut down
        return False
    except (RayError, RayServeException):
        return True


def _end_others(app_name: str, name: str) -> None:
    for actor in ray.util.list_named_actors(all_namespaces=True):
        other = actor["name"]
        is_master = other.startswith(f"{app_name}-kv-") and "-store-" not in other
        if actor["namespace"] == NAMESPACE and is_master and other != name:
            with suppress(ValueError):  # it has ended since it was listed
                ray.kill(ray.get_actor(other, NAMESPACE))


def _end_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
