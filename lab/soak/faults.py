"""The faults of a soak, by kind. Each is done at once to the service as it is, and returns a note on it.

A note is empty if there was nothing to disturb. Called by lab/soak/run.py.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from threading import Thread

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.status import PoolView
from tailrace.lab.soak.driver_process import DriverProcess
from tailrace.lab.soak.processes import is_running, read_all
from tailrace.lab.soak.scripts import EVALUATOR, TRAINER
from tailrace.lab.verification import chaos
from tailrace.lab.verification.disturbances import kill_actors
from tailrace.lab.verification.frozen_thread import busiest_of, freeze

FLIP = """
import sys
from tailrace.lab.verification.flipped_bits import flip
print(len(flip(sys.argv[1], sys.argv[2], set())), flush=True)
"""
"""Flips bits in a separate process: a client of the pool may hang or end with its master."""

ACT_S = 60.0
"""Longest time in seconds that a fault may take; the coordinator may be away meanwhile."""

FROZEN_S = 240.0
"""Longest time in seconds that an engine stays frozen: it counts as dead after a minute, or 20 of its slowest steps."""

LOOK_S = 1.0

NO_VICTIM = "nothing to disturb"


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a fault can reach. `place`: from 0 to below 1, chooses among victims."""

    client: RolloutClient
    drivers: Mapping[str, DriverProcess]
    place: float


async def kill_replica(scene: Scene) -> str:
    """Kills the replica with the most chunks."""
    replicas = (await scene.client.status()).replicas
    if not replicas:
        return ""
    victim = max(replicas, key=lambda replica: replica.running)
    return f"replica {victim.replica_id}, {victim.running} chunks" if kill_actors(victim.replica_id) else ""


async def freeze_engine(scene: Scene) -> str:
    """Lets a step never end. The thread that stopped it ends later, so that the kernel forgets the dead engine."""
    engines = [one.pid for one in read_all() if one.role == "Engine"]
    if not engines:
        return ""
    pid, thread, ticks = await asyncio.to_thread(busiest_of, engines)
    if not ticks:  # all of them wait for chunks
        return ""
    done: asyncio.Future = asyncio.get_running_loop().create_future()
    Thread(target=_hold, args=(pid, thread, done, asyncio.get_running_loop()), daemon=True).start()
    await done
    return f"a step of process {pid}"


def _hold(pid: int, thread: int, done: asyncio.Future, loop: asyncio.AbstractEventLoop) -> None:
    """Freezes a thread until its process has ended, FROZEN_S at most: it runs again once this thread has ended."""
    try:
        freeze(thread)
    except OSError as error:
        loop.call_soon_threadsafe(done.set_exception, error)
        return
    loop.call_soon_threadsafe(done.set_result, None)
    deadline_s = time.monotonic() + FROZEN_S
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(LOOK_S)


async def kill_drafter(_scene: Scene) -> str:
    return "draft model" if kill_actors("#Drafter#") else ""


async def kill_coordinator(_scene: Scene) -> str:
    return "coordinator" if kill_actors("#Coordinator#") else ""


async def kill_controller(_scene: Scene) -> str:
    """Kills the controller of Serve, which Ray starts again."""
    return "controller of Serve" if kill_actors("SERVE_CONTROLLER_ACTOR", no_restart=False) else ""


async def kill_shard(scene: Scene) -> str:
    """Kills a shard of the group context, which Ray starts again, empty."""
    killed = kill_actors("-context-", no_restart=False, place=scene.place)
    return "a shard of the group context" if killed else ""


async def _pool(scene: Scene) -> PoolView | None:
    """Returns the pool's view, or None if it has no figures now."""
    view = (await scene.client.status()).pool
    return view if view is not None and view.status is not None else None


def on_pool(do: Callable[[list[int]], Awaitable[None]], whom: chaos.Pids) -> Callable[[Scene], Awaitable[str]]:
    """Returns a disturbance of the pool's processes as a fault."""

    async def act(scene: Scene) -> str:
        view = await _pool(scene)
        pids = whom(view) if view else []
        if not pids:
            return ""
        await do(pids)
        return f"process {' '.join(map(str, pids))} at {view.status['keys']} keys"

    return act


async def flip_kv_bits(scene: Scene) -> str:
    """Flips a bit in every block that the pool has now."""
    view = await _pool(scene)
    if view is None:
        return ""
    addresses = view.status["master_address"], view.status["pages_address"]
    flipping = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FLIP, *addresses, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        lines = (await flipping.stdout.read()).split()
    finally:
        if flipping.returncode is None:
            flipping.kill()
        await flipping.wait()
    flipped = int(lines[-1]) if lines and lines[-1].isdigit() else 0
    return f"{flipped} blocks" if flipped else ""


def on_driver(name: str) -> Callable[[Scene], Awaitable[str]]:
    """Returns the fault that kills a driver; it comes back with the same batch id."""

    async def act(scene: Scene) -> str:
        return f"the {name}" if scene.drivers[name].kill() else ""

    return act


KINDS: dict[str, Callable[[Scene], Awaitable[str]]] = {
    "replica_killed": kill_replica,
    "engine_frozen": freeze_engine,
    "drafter_killed": kill_drafter,
    "coordinator_killed": kill_coordinator,
    "controller_killed": kill_controller,
    "context_shard_killed": kill_shard,
    "master_killed": on_pool(chaos.kill, chaos.master),
    "store_killed": on_pool(chaos.kill, chaos.stores),
    "store_frozen": on_pool(chaos.freeze, chaos.stores),
    "kv_bits_flipped": flip_kv_bits,
    "trainer_killed": on_driver(TRAINER),
    "evaluator_killed": on_driver(EVALUATOR),
}


async def act(kind: str, scene: Scene) -> tuple[bool, str]:
    """Returns whether the fault has happened, and a note."""
    try:
        async with asyncio.timeout(ACT_S):
            note = await KINDS[kind](scene)
    except Exception as error:  # noqa: BLE001 - a victim may be gone; the soak continues, and reports it
        return False, said(error)
    return bool(note), note or NO_VICTIM


def said(error: BaseException) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
