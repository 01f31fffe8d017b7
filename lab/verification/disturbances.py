"""Disturbances of a running batch: each happens once the batch is under way, and returns a note, empty if it did not.

Lost tokens must be made again, and be the same. Called by the runs of `tailrace verify`.
"""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.messages.status import BatchStatus, ServiceSnapshot
from tailrace.lab.verification.flipped_bits import flip
from tailrace.lab.verification.frozen_thread import busiest_of, freeze, processes_titled

UNDER_WAY_TOKENS = 20
"""Mean tokens of a sample: by then each has ended a chunk of 16, and the majority continue."""

FLIP_S = 0.3
"""Seconds between two looks for blocks whose bits are not flipped yet."""

DRIVER = """
import asyncio, sys
from tailrace import RolloutBatch, connect

async def roll():
    async for group in connect(sys.argv[2]).rollout(RolloutBatch.model_validate_json(open(sys.argv[1]).read())):
        pass

asyncio.run(roll())
"""
"""A driver: it rolls out the batch in a file on the cluster at an address."""


def batch_of(status: ServiceSnapshot, batch_id: str) -> BatchStatus | None:
    return next((batch for batch in status.batches if batch.batch_id == batch_id), None)


async def _under_way(client: RolloutClient, batch_id: str) -> ServiceSnapshot:
    """Returns the service's status once samples have UNDER_WAY_TOKENS on average, or half of them have ended."""
    while True:
        status = await client.status()
        batch = batch_of(status, batch_id)
        if batch and (batch.tokens >= UNDER_WAY_TOKENS * batch.samples or batch.ended >= batch.samples / 2):
            return status
        await asyncio.sleep(0.1)


def kill_actors(part: str, no_restart: bool = True, but: str = "", place: float | None = None) -> int:
    """Kills every actor with `part`, and without `but`, in its name. Returns their number.

    `place`: kill one of them alone, by its place in the order of names, from 0 to below 1.
    """
    import ray

    everyone = ray.util.list_named_actors(all_namespaces=True)
    actors = [named for named in everyone if part in named["name"] and not (but and but in named["name"])]
    if place is not None:
        first = int(place * len(actors))
        actors = sorted(actors, key=lambda named: named["name"])[first : first + 1]
    for actor in actors:
        ray.kill(ray.get_actor(actor["name"], actor["namespace"]), no_restart=no_restart)
    return len(actors)


async def kill_a_replica(client: RolloutClient, batch_id: str) -> str:
    """Kills, in mid-chunk, the replica with the most chunks."""
    status = await _under_way(client, batch_id)
    victim = max(status.replicas, key=lambda replica: replica.running)
    killed = kill_actors(victim.replica_id)
    return f"killed replica {victim.replica_id}, which ran {victim.running} chunks" if killed else ""


async def kill_the_coordinator(client: RolloutClient, batch_id: str) -> str:
    """Kills the coordinator: Serve starts another, which knows nothing; the driver's client continues."""
    status = await _under_way(client, batch_id)
    killed = kill_actors("#Coordinator#")
    return f"killed {killed} coordinator with {status.running} samples running" if killed else ""


async def kill_the_context(client: RolloutClient, batch_id: str) -> str:
    """Kills every actor that keeps the group context; Ray starts them again, empty."""
    await _under_way(client, batch_id)
    killed = kill_actors("-context-", no_restart=False)
    return f"killed {killed} actors of the group context" if killed else ""


async def kill_the_drafter(client: RolloutClient, batch_id: str) -> str:
    """Kills the drafter once its drafts come; Serve starts another."""
    before = guesses(await client.status())
    while guesses(await _under_way(client, batch_id)) <= before:
        await asyncio.sleep(0.05)
    killed = kill_actors("#Drafter#")
    return f"draft models killed: {killed}" if killed else ""


def guesses(status: ServiceSnapshot) -> int:
    """Returns the number of messages of draft models that engines have had so far."""
    return sum(replica.work.get("model_guesses", 0) for replica in status.replicas)


async def lose_a_replica(client: RolloutClient, batch_id: str) -> str:
    """Waits until the tail policy has given a replica back before the end of the batch; does nothing itself."""
    before = 0
    async for change in client.replica_changes():
        batch = batch_of(await client.status(), batch_id)
        if change.replicas < before and batch is not None:
            left = batch.samples - batch.ended
            return f"{before} replicas became {change.replicas} while {left} of {batch.samples} samples ran"
        before = change.replicas


async def freeze_a_step(client: RolloutClient, batch_id: str) -> str:
    """Stops, in mid-step, the thread of an engine: its process lives and answers, its step never ends."""
    status = await _under_way(client, batch_id)
    pid, thread, _ = await asyncio.to_thread(busiest_of, processes_titled("Engine"))
    freeze(thread)
    return f"froze a step of process {pid} with {status.running} samples running"


async def flip_kv_bits(client: RolloutClient, batch_id: str) -> str:
    """Flips a bit in every block of the pool, as long as the batch runs."""
    await _under_way(client, batch_id)
    flipped: set[str] = set()
    while batch_of(status := await client.status(), batch_id) is not None:
        pool = status.pool.status if status.pool else None
        if pool is not None:
            flipped |= await asyncio.to_thread(flip, pool["master_address"], pool["pages_address"], flipped)
        await asyncio.sleep(FLIP_S)
    return f"flipped a bit in each of {len(flipped)} blocks" if flipped else ""


async def lose_the_master(client: RolloutClient, batch_id: str) -> str:
    """Ends the pool's master for good, with its process, as the loss of its node would."""
    await _under_way(client, batch_id)
    view = (await client.status()).pool
    ended = kill_actors("-kv-", but="-store-")
    if view is not None and view.status is not None and view.status["master_pid"]:
        os.kill(view.status["master_pid"], signal.SIGKILL)
    return f"ended {ended} master of the pool" if ended else ""


async def kill_another_driver(client: RolloutClient, batch: RolloutBatch) -> str:
    """Starts the batch by another driver and kills that under way; the caller's driver gets the batch by its id. The
    note is empty if the other driver ends before.
    """
    import ray

    address = ray.get_runtime_context().gcs_address
    with tempfile.TemporaryDirectory(prefix="tailrace-driver-") as folder:
        file = Path(folder) / "batch.json"
        file.write_text(batch.model_dump_json())
        driver = await asyncio.create_subprocess_exec(sys.executable, "-c", DRIVER, str(file), address, cwd=folder)
        looking = asyncio.create_task(_under_way(client, batch.batch_id))
        ending = asyncio.create_task(driver.wait())
        try:
            await asyncio.wait({looking, ending}, return_when=asyncio.FIRST_COMPLETED)
            running = None if ending.done() else looking.result().running
        finally:
            looking.cancel()
            if driver.returncode is None:
                driver.kill()
            await ending
    return "" if running is None else f"killed a driver with {running} samples running"
