"""Clock, inbox and tasks of a coordinator. Its parts share this one object instead of a callback for each.

A turn of the loop is one pass of `Rollouts.run`; a look is one reading of all replicas' reports.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import NamedTuple

from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.records import SampleRecord
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.events import Event


class MadeTokens(NamedTuple):
    """The tokens of a chunk. `digests`: of the weights and of the adapter that made them."""

    batch: LiveBatch
    sample: SampleRecord
    start: StartChunk
    result: ChunkResult
    digests: tuple[str, str]


class Loop:
    """Must be created in the event loop that it serves. `reported`: set when a replica has a new report. `looked`: set
    once the replicas' reports have been read for the first time.
    """

    def __init__(self, reported: asyncio.Event):
        self._reported = reported
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self.began_s = self._clock()
        self.looked = asyncio.Event()
        self.tasks: set[asyncio.Task] = set()
        self._inbox: list[tuple[Event, MadeTokens | None]] = []
        self._wake, self._turned, self._seen = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def __len__(self):
        """Number of events that wait for a turn."""
        return len(self._inbox)

    def now(self) -> float:
        """Seconds since this object was created."""
        return self._clock() - self.began_s

    def tell(self, event: Event, made: MadeTokens | None = None) -> None:
        """Queues an event for the core's next turn, with the tokens that it brings."""
        self._inbox.append((event, made))
        self.wake()

    def wake(self) -> None:
        """Starts the next turn at once."""
        self._wake.set()

    def take(self) -> list[tuple[Event, MadeTokens | None]]:
        """Returns all queued events and empties the inbox."""
        inbox, self._inbox = self._inbox, []
        return inbox

    def spawn(self, coroutine: Coroutine) -> asyncio.Task:
        """Runs a coroutine as a task that is kept until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def woken(self, longest_s: float) -> None:
        """Waits for `wake`, at most `longest_s` seconds. Called by the loop itself."""
        await set_or_later(self._wake, longest_s)
        self._wake.clear()

    async def reported(self, longest_s: float) -> None:
        """Waits for a report, at most `longest_s` seconds. Called by the loop itself."""
        await set_or_later(self._reported, longest_s)
        self._reported.clear()

    def look_soon(self) -> None:
        """Has the replicas' reports read at once."""
        self._reported.set()

    def turn_ends(self) -> None:
        """Marks the end of a turn. Called by the loop itself."""
        self._turned.set()

    def look_ends(self) -> None:
        """Marks the end of a look at the replicas' reports. Called by the loop itself."""
        self._seen.set()

    async def turn(self) -> None:
        """Returns at the end of the turn under way, or of the next one if none is."""
        self._turned.clear()
        await self._turned.wait()

    async def look(self) -> None:
        """Returns once the replicas' reports have been read again."""
        self._seen.clear()
        await self._seen.wait()


async def set_or_later(event: asyncio.Event, longest_s: float) -> None:
    """Waits for an event, at most `longest_s` seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            await event.wait()
