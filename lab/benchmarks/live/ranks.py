"""Updates from every rank of a trainer, by layout: two replicas decode, and ranks are processes of this machine.

Ranks publish through shared memory. The layouts take turns, each with ranks of its own; the first update of each is not
counted.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import LOOPBACK_ONLY, service
from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.app.model import resolve_model
from tailrace.lab.benchmarks.live.decoding_load import DecodingLoad
from tailrace.lab.benchmarks.live.rank_process import LAYOUTS, RankJob

READY_S, UPDATE_S = 300.0, 300.0
"""Maximum seconds for ranks to load a model and connect, and for an update."""


def measure(file: ServeFile, layouts: Sequence[str], repeats: int, samples: int, say: Callable[[str], None]) -> dict:
    """Returns medians by layout, with every update. Seconds from the moment when all ranks are told to publish."""
    model = resolve_model(file.application.args.engine.model)
    with service(file, None) as client:
        return asyncio.run(_measured(client, model, layouts, repeats, samples, say))


async def _measured(
    client: RolloutClient, model: Path, layouts: Sequence[str], repeats: int, samples: int, say: Callable[[str], None]
) -> dict:
    load = DecodingLoad(client, samples)
    loading = asyncio.create_task(load.run())
    try:
        found = {}
        for layout in layouts:
            first = (await client.status()).weights_version + 1
            rows = await _updates(load, model, layout, range(first, first + repeats + 1), say)
            found[layout] = _medians(rows[1:]) | {"ranks": LAYOUTS[layout], "bytes": _bytes_of(model)}
            say(f"{layout}: {found[layout]}")
        return found
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def _updates(
    load: DecodingLoad, model: Path, layout: str, versions: range, say: Callable[[str], None]
) -> list[list[dict]]:
    """Returns the rows of all ranks by version."""
    ranks = _started(model, layout, tuple(versions))
    try:
        rows = []
        for version in versions:
            await load.busy(version - 1)
            for rank in ranks:
                rank.stdin.write("\n")
                rank.stdin.flush()
            lines = await asyncio.gather(*(_line(rank) for rank in ranks))
            rows.append([json.loads(line) for line in lines])
            say(f"{layout}, version {version}: {rows[-1]}")
        return rows
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


async def _line(rank: subprocess.Popen) -> str:
    line = await asyncio.wait_for(asyncio.to_thread(rank.stdout.readline), READY_S + UPDATE_S)
    if not line:
        raise Failed(f"a rank has ended: {rank.args[-1]}")
    return line


def _started(model: Path, layout: str, versions: tuple[int, ...]) -> list[subprocess.Popen]:
    import ray

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address, world_size = ray.get_runtime_context().gcs_address, LAYOUTS[layout]
    jobs = [RankJob(rank, world_size, port, address, str(model), layout, versions) for rank in range(world_size)]
    command = [sys.executable, "-m", "tailrace.lab.benchmarks.live.rank_process"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, job.text()], env=os.environ | LOOPBACK_ONLY, **pipes) for job in jobs]


def _bytes_of(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _medians(updates: list[list[dict]]) -> dict:
    """An update takes as long as its slowest rank."""
    paused = [value for ranks in updates for value in ranks[0]["paused_s"]]
    found = {key: median(max(rank[key] for rank in ranks) for ranks in updates) for key in ("update_s", "blocked_s")}
    return {key: round(value, 3) for key, value in (found | {"paused_s": median(paused)}).items()} | {
        "updates": [{key: round(max(rank[key] for rank in ranks), 3) for key in found} for ranks in updates]
    }
