"""A batch that grows while it runs: a driver requests some of its groups, then more, by streams of one name.

Invariant: `groups` returns all groups, or None if the service is in trouble; the driver then requests the whole batch.
A refusal for which a batch that does not grow would fail, too, is `refused`. Called by `drivers`.
"""

import asyncio
from random import Random

from ray.exceptions import RayError, RayTaskError

from tailrace.deployments.messages.liveness import RENEW_S
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import GroupResult, Rejected, RejectedBy, RolloutBatch
from tailrace.lab.fuzz.cluster import SimulatedCluster

GROWS_S = 0.0, 0.3, 2.0, 8.0
AGAIN_S = 2.0
"""Seconds until a driver repeats a request for groups that a quota has refused."""


class GrownBatch:
    """One growing batch. `rng`: used here alone."""

    def __init__(self, cluster: SimulatedCluster, batch: RolloutBatch, rng: Random):
        self._batch, self._rng = batch, rng
        self._handle, self._driver = cluster.handle(), f"grows-{rng.random()}"
        self._got: dict[str, GroupResult] = {}
        self._items: asyncio.Queue = asyncio.Queue()  # of all streams, each with the number of its stream
        self._streams: list = []
        self._tasks: list[asyncio.Task] = []
        self._asked = 0  # groups of the newest stream
        self.refused: str | None = None  # why the service has refused or failed this batch, though it is a good one

    async def groups(self) -> dict[str, GroupResult] | None:
        """Returns all groups by prompt id, or None."""
        self._tasks.append(asyncio.ensure_future(self._renew()))
        try:
            self._ask(self._rng.randint(1, len(self._batch.groups)))
            while len(self._got) < len(self._batch.groups):
                if not await self._next():
                    return None
            return self._got
        finally:
            for stream in self._streams:
                stream.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._handle.renew.remote(Role.TRAINER, self._batch.batch_id, self._driver, len(self._got))

    def _ask(self, size: int) -> None:
        """Opens a stream of the first `size` groups."""
        part, self._asked = self._batch.model_copy(update={"groups": self._batch.groups[:size]}), size
        have = [one.prompt_id for one in part.groups if one.prompt_id in self._got]
        stream = self._handle.options(stream=True).rollout.remote(Role.TRAINER, part, self._driver, have)
        self._streams.append(stream)
        self._tasks.append(asyncio.ensure_future(self._pump(len(self._streams) - 1, stream)))

    async def _pump(self, number: int, stream) -> None:
        try:
            async for item in stream:
                self._items.put_nowait((number, item))
        except RayError as error:
            self._items.put_nowait((number, error))
        self._items.put_nowait((number, None))

    async def _next(self) -> bool:
        """Takes one item, or grows. Returns False if the service is in trouble."""
        number, item = await self._item()
        if isinstance(item, GroupResult):
            self._got.setdefault(item.prompt_id, item)
        elif number == len(self._streams) - 1:  # an older stream ends by the newer one
            if isinstance(item, Rejected) and item.by is RejectedBy.QUOTA:
                await asyncio.sleep(AGAIN_S)  # the stream before it has its groups meanwhile
                self._ask(self._asked)
            elif item is not None:
                self.refused = _without_cause(item)
                return False
            elif len(self._got) < len(self._batch.groups):
                self._grow()
        return True

    async def _item(self) -> tuple:
        if self._asked == len(self._batch.groups):
            return await self._items.get()
        try:
            async with asyncio.timeout(self._rng.choice(GROWS_S)):
                return await self._items.get()
        except TimeoutError:
            return len(self._streams) - 1, None

    def _grow(self) -> None:
        """Requests more groups, in a new stream; this ends the stream before it."""
        self._ask(min(len(self._batch.groups), self._asked + self._rng.randint(1, 2)))


def _without_cause(item: Rejected | RayError) -> str | None:
    """Returns the reason of a refusal of the batch itself, or an exception of the coordinator, or None: the reader, the
    weights or an adapter may be at fault, or the coordinator is lost.
    """
    if isinstance(item, Rejected):
        return item.reason if item.by in (RejectedBy.CONTENT, RejectedBy.SIZE) else None
    return f"the coordinator raised {item.cause!r}" if isinstance(item, RayTaskError) else None
