"""Faults inside an engine's steps for which no sample is to blame."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.lab.fuzz.faults import Fault, FaultSite


async def breaks(site: "FaultSite", fault: "Fault") -> None:
    """Makes every further step of an engine raise, whatever runs: the engine must end, and its samples run
    elsewhere."""
    if replica := site.replica(fault):
        replica.stepper.broken = True


async def hiccups(site: "FaultSite", fault: "Fault") -> None:
    """Makes one step of an engine raise, and none after it: no sample is to blame."""
    if replica := site.replica(fault):
        replica.stepper.hiccup = True


OF_ENGINES: dict[str, Callable] = {"broken": breaks, "hiccup": hiccups}

HARMLESS = {
    "slow", "refuse", "late", "twice", "damaged", "line_breaks", "shard_dies", "shards", "actor_down", "actor_hangs",
    "actor_odd", "master_restarts", "strange_update", "strange_reserve", "join", "reset", "strange_batch", "hiccup",
}  # fmt: skip
"""Kinds of faults that cannot cost an engine's answer in which it refuses a sample."""
