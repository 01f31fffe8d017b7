"""Two updates of the weights close together, where the later one may arrive first. Called by `drivers`."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from random import Random

from ray.exceptions import RayError

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import WeightsRejected
from tailrace.deployments.messages.rollout import WeightsLoaded
from tailrace.lab.fuzz.checks import Ledger, Wrong
from tailrace.lab.fuzz.cluster import SimulatedCluster

BEFORE_S = 0.0, 0.0, 0.01, 0.05, 0.5, 3.0


class OvertakenUpdate:
    """An update that a later one overtakes. Law: it ends before the later one, or it is refused. `rng`: used here
    alone."""

    def __init__(self, client: RolloutClient, cluster: SimulatedCluster, ledger: Ledger, rng: Random):
        self._client, self._cluster, self._ledger, self._rng = client, cluster, ledger, rng

    async def run(self, version: int, later: Callable[[], Awaitable[None]]) -> None:
        """Gives the weights of `version`, and calls `later` at about the same time."""
        folder, content = f"w{version}-overtaken", f"content-{version}-overtaken"
        self._cluster.disk.folders[folder] = content
        self._ledger.offered.setdefault(version, set()).add(content)
        before_s = self._rng.choice(BEFORE_S)
        if self._rng.random() < 0.3:
            other = asyncio.ensure_future(later())
            await asyncio.sleep(before_s)
            early = asyncio.ensure_future(self._client.update_weights(version, folder))
        else:
            early = asyncio.ensure_future(self._client.update_weights(version, folder))
            await asyncio.sleep(before_s)
            other = asyncio.ensure_future(later())
        try:
            await other
            await self._end(early, version)
        finally:
            for task in (early, other):
                task.cancel()
            await asyncio.gather(early, other, return_exceptions=True)

    async def _end(self, early: asyncio.Task, version: int) -> None:
        was_done = early.done()
        try:
            loaded = await early
        except RayError:
            return
        except WeightsRejected as refused:
            return check_refused(refused, version)
        if not was_done and not self._cluster.forgetful:  # else a new coordinator has begun with older weights
            raise Wrong(f"update to {version} ended with {loaded} after {self._ledger.version} had been loaded")
        check_loaded(self._cluster, loaded)


def check_loaded(cluster: SimulatedCluster, loaded: WeightsLoaded) -> None:
    """Raises Wrong if `loaded` names a replica that never had the weights."""
    here = [cluster.replicas[name] for name in loaded.replicas if name in cluster.replicas]
    for replica in here:
        if (loaded.version, loaded.digest) not in replica.stepper.weights.had:
            raise Wrong(f"{replica.name} has never had weights {loaded.version}, which {loaded} says")


def check_refused(refused: WeightsRejected, version: int) -> None:
    """Raises Wrong if an older update is the reason of the refusal."""
    other = re.search(r"overtaken by (\d+)", str(refused))
    if other is not None and int(other[1]) <= version:
        raise Wrong(f"update to {version} was refused: {refused}")
