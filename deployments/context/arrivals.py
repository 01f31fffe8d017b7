"""Files that a shard now owns but has not yet received from their former owner.

Invariant: no wait is longer than the time given to `expect`, since a former owner that is dead sends nothing. Owned by
ContextShard, once for groups in flight and once for history.
"""

import asyncio
from collections.abc import Iterable


class Arrivals:
    """Must be created where an event loop runs."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, tuple[asyncio.Event, float]] = {}  # by file: its event, and its deadline
        self.missed = 0
        """Number of files that did not arrive in time."""

    def __len__(self) -> int:
        return len(self._due)

    def expect(self, files: Iterable[int], seconds: float) -> None:
        """Registers files that should arrive within `seconds`."""
        for file in files:
            self._due.setdefault(file, (asyncio.Event(), self._loop.time() + seconds))

    def arrived(self, file: int) -> None:
        """Records that a file has arrived, is empty, or is no longer expected."""
        if file in self._due:
            self._due.pop(file)[0].set()

    async def wait(self, files: Iterable[int]) -> None:
        """Returns when none of these files is expected any more."""
        for file in files:
            if file not in self._due:
                continue
            event, until_s = self._due[file]
            try:
                await asyncio.wait_for(event.wait(), max(0.0, until_s - self._loop.time()))
            except TimeoutError:
                self.missed += file in self._due
                self.arrived(file)
