"""The drivers of a run's worlds, beyond the drivers of its plan. They are never killed. Called by `run`."""

from random import Random
from typing import Protocol

from tailrace.lab.fuzz.checks import Ledger
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.worlds.early_ends import EarlyEnds
from tailrace.lab.fuzz.worlds.odd_turns import OddTurns
from tailrace.lab.fuzz.worlds.plan import WorldPlan
from tailrace.lab.fuzz.worlds.slow_rewards import SlowRewards


class Guest(Protocol):
    name: str
    ended: bool

    async def run(self) -> None: ...


def guests(seed: int, worlds: WorldPlan, cluster: SimulatedCluster, ledger: Ledger, calm: bool) -> list[Guest]:
    """Returns the guests of a run. `calm`: whether nothing in the run delays an engine's answers."""
    kinds = {"early": EarlyEnds, "turns": OddTurns, "rewards": SlowRewards}
    return [kinds[kind](cluster, ledger, rng=Random(f"{seed}:{kind}:asks"), calm=calm) for kind in worlds.guests]
