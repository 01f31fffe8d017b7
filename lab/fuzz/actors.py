"""Simulated actors: the pool's master, with its keys.

`problem` is a fault of the moment: each call then raises it, or waits.
"""

import asyncio
import re

from tailrace.kvpool.keys import version_of
from tailrace.kvpool.status import PoolDown, PoolStatus


class Actor:
    """An actor. `problem`: None, "down", "hangs" or "odd" (calls end in errors of Ray)."""

    def __init__(self):
        self.problem: str | None = None

    async def _meet(self) -> None:
        match self.problem:
            case "down":
                raise PoolDown("the master does not answer")
            case "hangs":
                await asyncio.sleep(45.0)


class SimulatedMaster(Actor):
    """The pool's master. `keys`: each key with the content of the weights that wrote it."""

    def __init__(self):
        super().__init__()
        self.keys: dict[str, str] = {}
        self.written: set[bytes] = set()  # names of all blocks, ever
        self.pid = 1

    def restart(self) -> None:
        self.pid += 1
        self.keys.clear()

    async def status(self) -> PoolStatus:
        await self._meet()
        zero = dict.fromkeys(("ssd_bytes", "ssd_capacity_bytes", "evicted_keys", "put_failures", "get_failures"), 0)
        return PoolStatus(
            master_address="master:1",
            pages_address="master:2",
            master_pid=self.pid,
            master_restarts=self.pid - 1,
            keys=len(self.keys),
            dram_bytes=len(self.keys) * 1024,
            dram_capacity_bytes=1 << 22,
            segment_bytes={},
            store_nodes=(),
            **zero,
        )

    async def release(self, keys: list[str]) -> tuple[int, list[str]]:
        await self._meet()
        return self._remove(keys), []

    async def retire(self, regex: str) -> int:
        await self._meet()
        return self._remove([key for key in self.keys if re.search(regex, key)])

    def _remove(self, keys: list[str]) -> int:
        return sum(self.keys.pop(key, None) is not None for key in keys)

    async def move(self, keys: list[str], segment: str) -> list[str]:
        await self._meet()
        return []

    async def keys_by_version(self) -> dict[int, int]:
        await self._meet()
        versions = [version_of(key) for key in self.keys]
        return {version: versions.count(version) for version in set(versions)}
