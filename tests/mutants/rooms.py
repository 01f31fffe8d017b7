"""The rooms whose mutants are made, and the parts of the tests that check them.

Files that run with a real engine or a real Mooncake alone are left out: `make test-planted` has defects of these.
"""

from mutants.mutant import ROOT, Mutant, mutants
from mutants.planting import compiles

ROOMS = {
    "core": ("policies/core/*.py",),
    "coordinator": ("deployments/coordinator/*.py",),
    "batches": ("deployments/batches/*.py",),
    "context": ("deployments/context/*.py",),
    "channel": ("deployments/channel/*.py",),
    "engine loop": tuple(f"deployments/engine/{name}.py" for name in ("engine_loop", "suspects", "adapters")),
    "client": ("app/calls/*.py",),
    "gateway": ("app/gateway/*.py",),
    "keys": tuple(f"kvpool/{name}.py" for name in ("keys", "block_check", "departures", "pool_config", "store")),
    "staging": ("deployments/staging/*.py",),
    "rewards": ("app/train/*rewards.py", "app/train/task.py", "app/trl/group_rewards.py"),
}

STAGES = {
    "pure": ("tests", "--ignore=tests/live"),
    "simulated": (
        "tests/live/simulated",
        *(f"--ignore=tests/live/simulated/test_{name}.py" for name in ("fuzz", "worlds")),
    ),
}
"""Tests that need no engine, in two parts that cannot share a process; those that survive one go to the next. Without
the fuzz's seeds, each of which enters nearly everything for a second."""


def drawn(room: str, count: int) -> list[Mutant]:
    """So many mutants of a room, by chance, the same in each run; all for 0."""
    files = sorted({str(path.relative_to(ROOT)) for form in ROOMS[room] for path in ROOT.glob(form)})
    ranked = sorted((one for file in files for one in mutants(file)), key=lambda one: one.rank)
    chosen: list[Mutant] = []
    for one in ranked:
        if count and len(chosen) == count:
            break
        if compiles(one):
            chosen.append(one)
    return chosen
