"""Disturbances of a training run: each happens while the samples of its step are in flight."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping

from tailrace.app.calls.client import RolloutClient
from tailrace.lab.verification.chaos import kill, stores

LOOK_S = 0.1

Disturb = Callable[[RolloutClient, str], Awaitable[str]]
"""A function that disturbs a service, given a client and the id of the step's batch. Returns a note, which is empty if
the disturbance did not happen.
"""


async def end_a_store(client: RolloutClient, batch_id: str) -> str:
    """Kills the process of a node of the KV pool, with all its KV. Returns a note, which is empty if there is no such
    process.
    """
    view = (await client.status()).pool
    pids = stores(view) if view is not None and view.status is not None else []
    await kill(pids[:1])
    return f"killed a store of the pool in batch {batch_id}" if pids else ""


class DisturbedSteps:
    """A context in which steps are disturbed. `by_step`: a disturbance for each disturbed step, counted from 0.
    `notes`: the disturbances' notes by step, at the end of the context.
    """

    def __init__(self, client: RolloutClient, by_step: Mapping[int, Disturb]):
        self._client, self._by_step = client, by_step
        self.notes: dict[int, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._follow()), daemon=True, name="disturbances")

    def __enter__(self) -> "DisturbedSteps":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    async def _follow(self) -> None:
        running: dict[int, asyncio.Task[str]] = {}
        while not self._over.is_set():
            for batch in (await self._client.status()).batches:
                name, _, rest = batch.batch_id.partition("-")
                step = int(rest.partition("-")[0]) if name == "step" else -1
                if step in self._by_step and step not in running:
                    disturb = self._by_step[step](self._client, batch.batch_id)
                    running[step] = asyncio.create_task(disturb)
            await asyncio.sleep(LOOK_S)
        for step, task in running.items():
            if task.done():
                self.notes[step] = task.result()
            else:
                task.cancel()
