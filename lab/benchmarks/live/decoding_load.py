"""Samples that keep two replicas decoding while weights are updated."""

import asyncio
import itertools
import time
from collections.abc import Coroutine
from random import Random
from typing import Any

from tailrace.app.calls.client import RolloutClient
from tailrace.app.errors import Failed
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch

BUSY_S = 90.0

LONG_TOKENS = 1500
"""Number of tokens of a sample that only keeps engines busy: its answer is forced, so that it does not end early."""

LOADS = 2
"""Number of batches in flight: with two, no replica waits for the last sample of a batch."""


class DecodingLoad:
    """Batches that are rolled out without end. `samples`: number of samples in flight, over LOADS batches."""

    def __init__(self, client: RolloutClient, samples: int):
        self._client, self._samples = client, samples
        self._numbers = itertools.count()

    async def run(self) -> None:
        """Keeps LOADS batches in flight until it is cancelled."""
        await asyncio.gather(*(self._batches() for _ in range(LOADS)))

    async def beside(self, work: Coroutine[Any, Any, dict]) -> dict:
        """Runs the load and `work`. Returns what `work` returns. Raises the load's error at once, as `work` would wait
        for replicas that are never busy.
        """
        working, loading = asyncio.create_task(work), asyncio.create_task(self.run())
        try:
            ended, _ = await asyncio.wait({working, loading}, return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()  # the load ends only by an error
        finally:
            for task in (working, loading):
                task.cancel()
            await asyncio.gather(working, loading, return_exceptions=True)

    async def busy(self, version: int, replicas: int = 2) -> None:
        """Returns once at least `replicas` replicas run samples under a version. Raises Failed after BUSY_S seconds."""
        deadline_s = time.monotonic() + BUSY_S
        while True:
            if time.monotonic() > deadline_s:
                status = await self._client.status()
                raise Failed(f"after {BUSY_S:.0f} s {replicas} replicas are not busy under {version}: {status!r}")
            found = (await self._client.status()).replicas
            if len([r for r in found if r.ready and r.running and r.weights_version == version]) >= replicas:
                return
            await asyncio.sleep(0.1)

    async def _batches(self) -> None:
        while True:
            number = next(self._numbers)
            draw = Random(number)
            groups = tuple(
                PromptGroup(
                    prompt_id=str(place),
                    text=f"Once upon a time, {number}.{place}:",
                    samples=1,
                    max_tokens=LONG_TOKENS,
                    forced_token_ids=(tuple(draw.randrange(100, 40_000) for _ in range(LONG_TOKENS - 1)),),
                )
                for place in range(max(1, self._samples // LOADS))
            )
            async for _ in self._client.rollout(RolloutBatch(batch_id=f"load-{number}", groups=groups)):
                pass
