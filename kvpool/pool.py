"""How others come to the pool: the coordinator by `ensure_pool`, an engine replica by `join_pool`."""

from ray.actor import ActorHandle

from kvpool.config import PoolConfig, PoolEndpoint


def ensure_pool(config: PoolConfig, app_name: str) -> ActorHandle:
    """The handle of the application's KvMaster, started on this node if there is none; does not wait for it."""
    raise NotImplementedError


def join_pool(config: PoolConfig, app_name: str) -> PoolEndpoint:
    """Master and this node's store are up and this node's memory is mounted, JOIN_S at most.

    Blocks; may be called on a thread with an event loop. Raises PoolDown, in one line.
    """
    raise NotImplementedError
