"""Faults inside the steps of an engine that no sample is to blame for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.lab.fuzz.faults import Fault, FaultSite


async def breaks(site: "FaultSite", fault: "Fault") -> None:
    """From now on every step of an engine raises, whatever runs: it must end, and its samples run elsewhere."""
    if replica := site.replica(fault):
        replica.stepper.broken = True


async def hiccups(site: "FaultSite", fault: "Fault") -> None:
    """One step of an engine raises, and none after it: no sample is to blame."""
    if replica := site.replica(fault):
        replica.stepper.hiccup = True


OF_ENGINES: dict[str, Callable] = {"broken": breaks, "hiccup": hiccups}

HARMLESS = {
    "slow", "refuse", "late", "twice", "damaged", "line_breaks", "shard_dies", "shards", "actor_down", "actor_hangs",
    "actor_odd", "master_restarts", "strange_update", "strange_reserve", "join", "reset", "strange_batch", "hiccup",
}  # fmt: skip
"""Kinds that cost no answer of an engine that is a refusal of a sample."""
