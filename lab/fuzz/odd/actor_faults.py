"""Faults of the actors around the engines: the pool's master, and the shards of the group context."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.lab.fuzz.faults import Fault, FaultSite


def meets(problem: str) -> Callable:
    """Returns a fault that gives an actor's calls this problem for a while, see `Actor`."""

    async def do(site: "FaultSite", fault: "Fault") -> None:
        cluster = site.cluster
        actors = [cluster.master] if cluster.master else []
        actors += cluster.shards.shards.values() if cluster.shards else []
        if actors:
            actor = actors[fault.target % len(actors)]
            actor.problem = problem
            await asyncio.sleep(fault.seconds)
            actor.problem = None

    return do


async def master_restarts(site: "FaultSite", fault: "Fault") -> None:
    """Restarts the master, which loses every key."""
    if site.cluster.master:
        site.cluster.master.restart()


async def shard_dies(site: "FaultSite", fault: "Fault") -> None:
    """Kills a shard's process, which is started again."""
    if site.cluster.shards:
        site.cluster.shards.kill(fault.target)
