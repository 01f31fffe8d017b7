"""Updates of the weights of two replicas that decode: through a folder on disk, and through shared memory.

Modes take turns, each with the same two sets of weights. Then a replica is killed between updates, so that its
successor joins late, and another one in mid-update. After each counted update and each kill, the tokens of a small
batch are compared with those that the same weights gave from a folder.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

from safetensors.torch import load_file

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import DEPLOY_S, service
from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.app.files.prompts import read_prompts
from tailrace.app.model import perturbed, resolve_model
from tailrace.app.trl.weights_folders import WeightsFolders
from tailrace.deployments.messages.rollout import RolloutBatch, WeightsLoaded
from tailrace.lab.benchmarks.live.decoding_load import DecodingLoad
from tailrace.lab.demo import PROMPTS
from tailrace.lab.verification.disturbances import kill_actors

PROBE_TOKENS = 32
KILL_AFTER_S = 0.3
"""Seconds from the start of an update until a replica is killed: the update is staged, and replicas check or load."""


class Updates:
    """One service under load, and two sets of weights for its updates. `tensors`: both sets, by name. `disk`: folder to
    which updates through a folder are written.
    """

    def __init__(self, client: RolloutClient, folders: list[Path], disk: Path, samples: int):
        self.client, self.load = client, DecodingLoad(client, samples)
        self.tensors = [load_file(folder / "model.safetensors") for folder in folders]
        self._disk = WeightsFolders(disk)
        self.version = 0
        self._numbers = itertools.count()

    async def by_folder(self, which: int) -> dict:
        self.version += 1
        began_s = time.monotonic()
        folder = await asyncio.to_thread(self._disk.write, self.version, self.tensors[which].items())
        blocked_s = time.monotonic() - began_s
        loaded = await self.client.update_weights(self.version, str(folder))
        return _figures(loaded, began_s, blocked_s)

    async def by_memory(self, which: int) -> dict:
        self.version += 1
        began_s = time.monotonic()
        staged = await self.client.stage_weights(self.version, self.tensors[which])
        blocked_s = time.monotonic() - began_s
        loaded = await self.client.commit_weights(staged)
        return _figures(loaded, began_s, blocked_s)

    async def probe(self) -> list[tuple[int, ...]]:
        """Returns the tokens of a small batch, which runs before all others. The tokens depend on the weights alone."""
        groups = tuple(read_prompts(PROMPTS, {"samples": 1, "max_tokens": PROBE_TOKENS}))[:4]
        batch = RolloutBatch(batch_id=f"probe-{next(self._numbers)}", groups=groups, priority=1)
        found = {group.prompt_id: group.samples[0].token_ids async for group in self.client.rollout(batch)}
        return [found[group.prompt_id] for group in groups]

    async def busy(self) -> None:
        """Returns once both replicas run samples under the present version."""
        await self.load.busy(self.version)


def _figures(loaded: WeightsLoaded, began_s: float, blocked_s: float) -> dict:
    return {
        "total_s": round(time.monotonic() - began_s, 3),
        "trainer_blocked_s": round(blocked_s, 3),
        "engine_paused_s": [round(value, 3) for value in loaded.paused_s.values()],
    }


def measure(file: ServeFile, repeats: int, samples: int, say: Callable[[str], None]) -> dict:
    """Returns the figures of each mode, of a replica that joins late, and of one that is killed in mid-update.
    `same_tokens`: each set of weights gave the same tokens every time, and the two sets gave other ones.
    """
    model = resolve_model(file.application.args.engine.model)
    with tempfile.TemporaryDirectory(prefix="tailrace-weights-") as scratch:
        folders = [model, perturbed(model, Path(scratch) / "other", scale=0.02)]
        with service(file, None) as client:
            updates = Updates(client, folders, Path(scratch) / "sent", samples)
            return asyncio.run(updates.load.beside(_measured(updates, repeats, say)))


async def _measured(updates: Updates, repeats: int, say: Callable[[str], None]) -> dict:
    modes: dict[str, list[dict]] = {"folder": [], "memory": []}
    said: dict[int, list] = {}
    same = True
    for update in (updates.by_folder, updates.by_memory):  # the first of each starts an actor, and makes files
        await updates.busy()
        await update(0)
    await updates.busy()
    for turn in range(repeats):
        for name, update in (("folder", updates.by_folder), ("memory", updates.by_memory)):
            which = (turn + 1) % 2
            modes[name].append(await update(which))
            say(f"{name}: {modes[name][-1]}")
            tokens = await updates.probe()
            same &= said.setdefault(which, tokens) == tokens
            await updates.busy()
    nbytes = sum(tensor.nbytes for tensor in updates.tensors[0].values())
    result = {"bytes": nbytes, **{name: _medians(rows) for name, rows in modes.items()}}
    for which in {0, 1} - said.keys():
        said[which] = await _said(updates, which)
    result["same_tokens"] = same and said[0] != said[1]  # an update that loads nothing changes no token
    result["late_replica"] = await _late(updates, said, say)
    result["killed_in_mid_update"] = await _killed(updates, said, say)
    return result


async def _said(updates: Updates, which: int) -> list:
    await updates.by_folder(which)
    return await updates.probe()


def _medians(rows: list[dict]) -> dict:
    paused = [value for row in rows for value in row["engine_paused_s"]]
    return {
        "total_s": round(median(row["total_s"] for row in rows), 3),
        "trainer_blocked_s": round(median(row["trainer_blocked_s"] for row in rows), 3),
        "engine_paused_s": round(median(paused), 3),
        "updates": rows,
    }


async def _late(updates: Updates, said: dict, say: Callable[[str], None]) -> dict:
    """Kills a replica between updates, and returns figures of its successor.

    The successor starts with the model's first weights, and joins with the present ones, which are in memory. Raises
    Failed if there is none after DEPLOY_S.
    """
    await updates.by_memory(1)
    await updates.busy()
    before = {replica.replica_id for replica in (await updates.client.status()).replicas}
    began_s = time.monotonic()
    kill_actors(min(before))
    while not (new := {r.replica_id for r in (await updates.client.status()).replicas if r.ready} - before):
        if time.monotonic() > began_s + DEPLOY_S:
            raise Failed(f"no replica has joined {DEPLOY_S:.0f} s after one was killed")
        await asyncio.sleep(0.05)
    took_s = round(time.monotonic() - began_s, 2)
    held = {r.replica_id: r.weights_version for r in (await updates.client.status()).replicas}
    result = {"joined_after_s": took_s, "on_version": held[min(new)] == updates.version}
    result["same_tokens"] = await updates.probe() == said[1]
    say(f"late replica: {result}")
    return result


async def _killed(updates: Updates, said: dict, say: Callable[[str], None]) -> dict:
    await updates.busy()
    before, former = updates.version, said[1]
    updating = asyncio.create_task(updates.by_memory(0))
    await asyncio.sleep(KILL_AFTER_S)
    held = sorted((await updates.client.status()).replicas, key=lambda replica: replica.replica_id)
    kill_actors(held[0].replica_id)
    outcome = await _outcome(updating)
    version = (await updates.client.status()).weights_version
    right = said[0] if version > before else former
    result = {"update": outcome, "serves": "new" if version > before else "former"}
    result["same_tokens"] = await updates.probe() == right
    say(f"killed in mid-update: {result}")
    return result


async def _outcome(updating: Awaitable[dict]) -> dict | str:
    try:
        return await updating
    except ValueError as error:  # the service's refusal
        return str(error)
