"""Files that a shard has become the owner of, until their former owner has handed them over.

Invariant: no wait is longer than the time that was given with `expect`: a former owner that is dead hands nothing over.
Owned by ContextShard, once for groups in flight and once for history.
"""

import asyncio
from collections.abc import Iterable


class Arrivals:
    """Make it where an event loop runs."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._due: dict[int, tuple[asyncio.Event, float]] = {}  # by file, with the end of its time
        self.missed = 0
        """Files that did not come in their time."""

    def __len__(self) -> int:
        return len(self._due)

    def expect(self, files: Iterable[int], seconds: float) -> None:
        """These files are to come within this time."""
        for file in files:
            self._due.setdefault(file, (asyncio.Event(), self._loop.time() + seconds))

    def arrived(self, file: int) -> None:
        """A file is here, or has nothing in it, or is expected no more."""
        if file in self._due:
            self._due.pop(file)[0].set()

    async def wait(self, files: Iterable[int]) -> None:
        """Returns when none of these is expected any more."""
        for file in files:
            if file not in self._due:
                continue
            event, until_s = self._due[file]
            try:
                await asyncio.wait_for(event.wait(), max(0.0, until_s - self._loop.time()))
            except TimeoutError:
                self.missed += file in self._due
                self.arrived(file)
