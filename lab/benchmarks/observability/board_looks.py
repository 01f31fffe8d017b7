"""A board that watches the coordinator of a modelled fleet, and the processor time of the looks for the board.

The time is that of the loop's thread. Serve's own cost of an item is left out, see `bench control`.
"""

import re
import time

from tailrace.deployments.coordinator.rollouts import Rollouts

HEAD = re.compile(rb'{"epoch": "([^"]*)", "number": (\d+)')


class Reader:
    """Reader of one board's stream, in Serve's place, whose items are bytes. `bytes`: length of all items so far."""

    def __init__(self, rollouts: Rollouts):
        self._feed, self.bytes = rollouts.feed, 0

    async def run(self) -> None:
        epoch, number = "", 0
        while True:
            async for item in self._feed.follow(epoch, number):
                head = HEAD.match(item)
                epoch, number = head[1].decode(), int(head[2])
                self.bytes += len(item)


class TimedLooks:
    """Replacement of the feed's look that times it. `took_s`: processor seconds of each look."""

    def __init__(self, rollouts: Rollouts):
        self._look, self.took_s = rollouts.feed._look, []
        rollouts.feed._look = self

    def __call__(self) -> None:
        began_s = time.thread_time()
        self._look()
        self.took_s.append(time.thread_time() - began_s)
