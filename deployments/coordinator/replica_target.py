"""Number of engine replicas that are up and wanted. Serve reads it to start and stop replicas; drivers that wait for
returned resources follow it.

Invariant: a follower gets the present state first, and then every later change before it waits for the next one; a slow
follower misses states that were overtaken. Called by `Rollouts` and the coordinator, in one event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator

from tailrace.deployments.messages.status import ReplicasChanged
from tailrace.policies.protocol.actions import SetReplicas


class ReplicaTarget:
    """`wanted`: None before the first decision; until then Serve's own number of replicas holds. `reason`: why the
    number is wanted.
    """

    def __init__(self):
        self.wanted: int | None = None
        self._drafters = self._aside = 0
        self._up, self.reason, self._at_s = 0, "", time.time()
        self._changed = asyncio.Condition()

    def want(self, action: SetReplicas) -> None:
        self.wanted, self._drafters, self.reason = action.replicas, action.drafters, action.reason
        self._tell()

    def see(self, up: int, aside: int = 0) -> None:
        """Records the number of replicas that have joined and not left. `aside`: number of those that are lost to the
        core by the score of their weights, which Serve counts.
        """
        self._aside = aside
        if up != self._up:
            self._up = up
            self._tell()

    def metrics(self) -> dict[str, float]:
        """Returns the wanted replicas by deployment, for `record_autoscaling_stats`. Those that are set aside come on
        top of the ones that stay: else Serve would stop as many that the core has not closed.
        """
        if self.wanted is None:
            return {}
        engines = max(self.wanted, min(self.wanted, self._up) + self._aside) if self.wanted else 0
        return {"Engine": float(engines), "Drafter": float(self._drafters)}

    async def changes(self) -> AsyncIterator[ReplicasChanged]:
        """Yields the present state, then each change. Never ends."""
        told = None
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda told=told: self._state() != told)
            told = self._state()
            yield ReplicasChanged(replicas=told[0], wanted=told[1], reason=self.reason, at_s=self._at_s)

    def _state(self) -> tuple[int, int]:
        return self._up, self._up if self.wanted is None else self.wanted

    def _tell(self) -> None:
        self._at_s = time.time()
        self._task = asyncio.get_running_loop().create_task(self._wake())  # a condition is notified under its lock

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
