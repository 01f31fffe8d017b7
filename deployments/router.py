"""Calls that name the replica they are for, and one call to every replica with a deadline.

Invariant: a call reaches the replica whose unique id it gave as `session_id`, or fails at once with ReplicaGone; it is
never re-routed. Policies decide placement, so Serve's own balancing must not change it. Loaded by Ray Serve in every
process that holds a handle to the engine deployment.
"""

from typing import Any
from weakref import WeakValueDictionary

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class ReplicaGone(ConnectionError):
    """The addressed replica is not among the running ones, or did not take the call. The caller resumes."""


ROUTERS: "WeakValueDictionary[str, AddressedRouter]" = WeakValueDictionary()
"""The routers of this process, by application and deployment."""


class AddressedRouter(RequestRouter):
    """Use with `handle.options(session_id=replica_unique_id).method.remote(...)`.

    Raises ReplicaGone in the caller, also when this process has not yet heard of a new replica: address only
    replicas that answered `poll_all`. A call already accepted by a replica that then dies ends in
    `ray.exceptions.RayActorError`.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from tailrace.deployments import router  # Serve carries this class by value, with copies of its module's names

        super().update_replicas(replicas)
        router.ROUTERS[str(self._deployment_id)] = self

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        raise NotImplementedError("every call is addressed, see _choose_replica_for_request")

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        # Overridden because Serve's own matching hands a fulfilled choice to *any* waiting call unless routing
        # is first in, first out: concurrent addressed calls then swap replicas or never return (Ray 2.60).
        from tailrace.deployments.router import ReplicaGone  # not the copy that came with this class, see above

        name = pending_request.metadata.session_id
        method = pending_request.metadata.call_method
        if not name:
            raise ReplicaGone(f"call to {method!r} names no replica; give its unique id as session_id")
        replica = self.curr_replicas.get(ReplicaID(unique_id=name, deployment_id=self._deployment_id))
        if replica is None:
            raise ReplicaGone(f"replica {name!r} is not running; call to {method!r} was not sent")
        if is_retry:
            raise ReplicaGone(f"replica {name!r} did not take the call to {method!r}")
        return replica


def running_replicas(handle: DeploymentHandle) -> list[str]:
    """Returns unique ids of the running replicas, as this process knows them; none before its first call by the
    handle.
    """
    router = ROUTERS.get(str(handle.deployment_id))
    return [] if router is None else [replica.unique_id for replica in tuple(router.curr_replicas)]


async def poll_all(handle: DeploymentHandle, method: str, timeout_s: float, *args: Any) -> list[Any]:
    """Calls `method(*args)` on every running replica. Returns each result, or the exception it ended with, in no order.

    Returns an empty list if there is no replica yet. Raises TimeoutError if not all have answered after `timeout_s`.
    """
    try:
        return await handle.broadcast(method, *args).results_async(timeout_s=timeout_s, return_exceptions=True)
    except DeploymentUnavailableError:
        return []
