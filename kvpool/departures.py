"""Departure of stores: their keys move to other stores before they end.

Invariant: a store with keys that can still move stays, for at most HAND_OVER_S; the last store of the pool stays while
it has any key. A key that did not move is a miss, and counted. Owned by KvMaster.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from tailrace.kvpool.admin import PoolAdmin
from tailrace.kvpool.status import PoolDown

HAND_OVER_S = 60.0
"""Maximum seconds for moves, from the first one on."""

LOOK_S = 0.5
"""Seconds between two reads of the keys of a departing store."""


class Departures:
    """`up`: returns the admin client, or raises PoolDown. `counts`: counts since the start, named as in PoolStatus."""

    def __init__(self, up: Callable[[], PoolAdmin]):
        self._up = up
        self._tasks: dict[str, asyncio.Task] = {}  # by segment: stores that leave, or have left and are still mounted
        self._ended: set[str] = set()  # stores that may end, and have been notified
        self.counts: Counter[str] = Counter()

    def see(self, segment: str, leaving: bool) -> bool:
        """Takes a store's report. Returns whether the store may end. A store that no longer leaves starts over."""
        task = self._tasks.get(segment)
        if not leaving:
            self._ended.discard(segment)
            if task is not None:
                self._tasks.pop(segment).cancel()
            return False
        if task is None:
            self._tasks[segment] = asyncio.get_running_loop().create_task(self._empty(segment))
            return False
        if task.done() and segment not in self._ended:
            self._ended.add(segment)
            self.counts.update(left_stores=1, lost_keys=task.result())
        return task.done()

    async def stop(self) -> None:
        """Ends all departures."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _empty(self, segment: str) -> int:
        """Moves keys until the segment is empty or its time is over. Returns the number of keys left in it."""
        began_s, before, asked = None, {}, set()
        while True:
            try:
                keys = await self._up().keys_at(segment)
                self._count(before, keys, asked)
                before = keys
                segments = await self._up().segments()
                self._tasks = {name: task for name, task in self._tasks.items() if name in segments or not task.done()}
                self._ended &= self._tasks.keys()
                others = self._staying(segments, segment)
                if not others:
                    began_s = None
                elif began_s is None:
                    began_s = time.monotonic()
                if not keys or (began_s is not None and time.monotonic() - began_s > HAND_OVER_S):
                    break
                asked &= keys.keys()
                new = [key for key in keys if key not in asked]
                for place, other in enumerate(others):
                    asked.update(await self._up().move(new[place :: len(others)], other))
            except PoolDown:  # its keys are gone, or it is asked again
                pass
            except Exception as error:  # noqa: BLE001 - an odd answer of the master: it is asked again
                logging.getLogger(__name__).warning("keys of %s: %r", segment, error)
            await asyncio.sleep(LOOK_S)
        self.counts["hand_over_ms"] += round((time.monotonic() - (began_s or time.monotonic())) * 1000)
        return len(keys)

    def _staying(self, segments: Iterable[str], segment: str) -> list[str]:
        """Returns the segments that a segment's keys go to: those of stores that stay, or one of a departing store for
        all.
        """
        staying = [one for one in segments if one not in self._tasks] or [max(segments, default=segment)]
        return [one for one in staying if one != segment]

    def _count(self, before: dict[str, int], now: dict[str, int], asked: set[str]) -> None:
        """Counts the keys that have moved since the last look, or were released meanwhile."""
        gone = [key for key in before if key not in now and key in asked]
        self.counts["handed_keys"] += len(gone)
        self.counts["handed_bytes"] += sum(before[key] for key in gone)
