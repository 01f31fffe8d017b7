"""Leftovers of a rollout: keys and bytes in the pool after it, processes after the service. All three must be 0.

Called by `tailrace pool verify`.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.app.summary import summarise
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.messages.status import PoolView
from tailrace.policies.families.registry import Policies

SETTLE_S = 15.0
"""Longest wait in seconds for the pool to become empty, and for processes to end: releases are asynchronous."""

MOVING = {"ordering": "seer", "placement": "round_robin", "chunking": {"type": "fixed", "chunk_tokens": 48}}
"""Policies by which every sample goes through the pool, whatever is configured."""


def measure(file: ServeFile, groups: tuple[PromptGroup, ...], say: Callable[[str], None]) -> dict:
    """Rolls `groups` out on a local service with every sample moving at every chunk, and counts the leftovers."""
    say("starting the service")
    with service(file, None) as client:
        summary, most_keys, view = asyncio.run(_roll(client, groups, say))
    master = view.status["master_address"] if view.status else ""
    deadline_s = time.monotonic() + SETTLE_S
    while (left := processes_of(master)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return {
        "keys": view.status["keys"] if view.status else -1,
        "bytes": view.status["dram_bytes"] + view.status["ssd_bytes"] if view.status else -1,
        "processes": len(left),
        "keys_meanwhile": most_keys,
        "swept_keys": view.counts.get("swept_keys", 0),
        "pool_tokens": view.counts.get("pool_tokens", 0),
        "tokens": summary["tokens"],
        "moved_samples": summary["moved_samples"],
    }


async def _roll(client: RolloutClient, groups, say) -> tuple[dict, int, PoolView]:
    """Returns the summary, the max number of keys during the run, and the pool once it is empty (or SETTLE_S after the
    end).
    """
    await client.set_policies(Policies(**MOVING))
    most_keys = 0

    async def watch() -> None:
        nonlocal most_keys
        while True:
            view = (await client.status()).pool
            most_keys = max(most_keys, view.status["keys"] if view.status else 0)
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    summary = summarise([group async for group in client.rollout(RolloutBatch(batch_id="pool-verify", groups=groups))])
    watching.cancel()
    if watching.done():  # it ends by an error alone
        watching.result()
    say(f"{summary['tokens']} tokens, at most {most_keys} keys at a time")
    deadline_s = time.monotonic() + SETTLE_S
    await asyncio.sleep(1.0)  # two polls: the figures must be from after the end
    while time.monotonic() < deadline_s:
        view = (await client.status()).pool
        if view.status and not view.status["keys"] and not view.status["dram_bytes"] + view.status["ssd_bytes"]:
            break
        await asyncio.sleep(0.2)
    return summary, most_keys, view


def processes_of(master_address: str) -> list[int]:
    """Returns the process ids of this pool's master and stores: their command lines name the master's address or its
    port.
    """
    port = master_address.rpartition(":")[2]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended since
            continue
        if "mooncake_" in command.partition("\0")[0] and port and port in command:
            found.append(int(folder.name))
    return found
