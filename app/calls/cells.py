"""A driver's calls over several cells: each group goes to the cell of its prompt's id, and all come back as one stream.

A sample's tokens do not depend on its cell, since its key names batch, prompt and index alone.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.messages.rollout import GroupResult, RolloutBatch, WeightsLoaded
from tailrace.policies.models.lending import cell_of


class CellClients:
    """`clients`: of the cells, by their names."""

    def __init__(self, clients: Mapping[str, RolloutClient]):
        self._clients = clients

    async def rollout(self, batch: RolloutBatch) -> AsyncIterator[GroupResult]:
        """Each group as it finishes, from any cell. The first error of a cell ends all. See `RolloutClient.rollout`."""
        results: asyncio.Queue[GroupResult | Exception | None] = asyncio.Queue()
        parts = {name: [] for name in self._clients}
        for group in batch.groups:
            parts[cell_of(group.prompt_id, list(parts))].append(group)
        tasks = [
            asyncio.ensure_future(self._pump(name, batch.model_copy(update={"groups": tuple(groups)}), results))
            for name, groups in parts.items()
            if groups
        ]
        open_streams = len(tasks)
        try:
            while open_streams:
                item = await results.get()
                if isinstance(item, Exception):
                    raise item
                open_streams -= item is None
                if item is not None:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, name: str, batch: RolloutBatch, results: asyncio.Queue) -> None:
        try:
            async with aclosing(self._clients[name].rollout(batch)) as groups:
                async for group in groups:
                    results.put_nowait(group)
        except Exception as error:  # noqa: BLE001 - goes to the reader
            results.put_nowait(error)
        else:
            results.put_nowait(None)

    async def update_weights(self, version: int, source: str) -> list[WeightsLoaded]:
        """Every replica of every cell loads the weights. See `RolloutClient.update_weights`."""
        return list(await asyncio.gather(*(one.update_weights(version, source) for one in self._clients.values())))
