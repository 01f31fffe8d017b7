"""The stream of deltas that a coordinator gives to its watchers.

Invariant: while there is a watcher, the service is read once every EVERY_S or less often, however many watch; else
never. A stream ends after STREAM_DELTAS, so that an unread or abandoned one holds no more than that; its reader opens
the next one where it ended. Owned by the coordinator.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tailrace.deployments.feed.deltas import Deltas
from tailrace.deployments.feed.looks import Looks
from tailrace.deployments.messages.rollout import Rejected

EVERY_S = 0.5

LOOKS_SHARE = 1 / 250
"""Maximum share of the loop's time: in a large fleet, where a look takes longer, looks are less frequent than
EVERY_S.
"""

LOOKS_AVERAGED = 8
"""Number of looks whose average duration delays the next one: a single look may be held up by anything."""

STREAM_DELTAS = 60

MAX_FOLLOWERS = 32
"""Maximum number of streams at once. A board needs one, whatever number of browsers it serves."""

POOL_BYTES_S = 30.0
"""Seconds between reads of the keys of each weights version: the pool's master scans every key for one."""

MAX_POOL_KEYS = 200_000
"""Maximum number of keys of a pool that is asked for them: with more, the answer would take its master a second."""


class Feed:
    """`keys_by_version`: asks the pool's master, or None if there is no pool. `note`: counts an error of one look.
    `spent_s`: clock of the loop's processor time.
    """

    def __init__(
        self,
        looks: Looks,
        epoch: str,
        keys_by_version: Callable[[], Awaitable[dict[int, int] | None]] | None,
        note: Callable[[Exception], None],
        spent_s: Callable[[], float] = time.thread_time,
    ):
        self._spent_s, self._look_s = spent_s, 0.0  # `_look_s`: average duration of a look
        self._looks, self._epoch, self._keys_by_version, self._note = looks, epoch, keys_by_version, note
        self._deltas: Deltas | None = None
        self._loops: list[asyncio.Task] = []
        self._begun = self.followers = 0

    async def follow(self, epoch: str, number: int) -> AsyncIterator[bytes | Rejected]:
        """See `Deltas.follow`. Ends after STREAM_DELTAS."""
        if self.followers >= MAX_FOLLOWERS:
            yield Rejected(reason=f"{self.followers} streams are open, as many as the service gives; try again")
            return
        self.followers += 1
        try:
            left = STREAM_DELTAS
            async for item in self._open().follow(epoch, number):
                yield item
                left -= 1
                if not left:
                    return
        finally:
            self.followers -= 1
            asyncio.get_running_loop().call_later(2 * EVERY_S, self._close_idle)

    def _open(self) -> Deltas:
        if self._deltas is None:
            self._begun += 1
            self._deltas = Deltas(f"{self._epoch}.{self._begun}")
            self._looks.begin()
            self._look()
            loops = [self._run()] + ([] if self._keys_by_version is None else [self._ask_pool()])
            self._loops = list(map(asyncio.get_running_loop().create_task, loops))
        return self._deltas

    def _close_idle(self) -> None:
        """Ends the looks, unless there is a watcher again."""
        if not self.followers and self._deltas is not None:
            self._deltas = None
            for loop in self._loops:
                loop.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(EVERY_S, self._look_s / LOOKS_SHARE))
            began_s = self._spent_s()
            self._look()
            self._look_s += (self._spent_s() - began_s - self._look_s) / LOOKS_AVERAGED

    def _look(self) -> None:
        changes = {}
        try:
            changes = self._looks.look()
        except Exception as error:  # noqa: BLE001 - one look's error: it must not end the service
            self._note(error)
        self._deltas.put(time.time(), changes)

    async def _ask_pool(self) -> None:
        while True:
            few = self._deltas.state.get("pool", {}).get("keys", 0) <= MAX_POOL_KEYS
            self._looks.pool_keys = (await self._keys_by_version() or {}) if few else {}
            await asyncio.sleep(POOL_BYTES_S)
