"""Boards that watch the coordinator of `tailrace bench fleet`, and their share of its loop.

The loop's own time for each look is taken by the clock of its thread: the shares of the whole loop with and without
boards differ by more from one minute to the next. Left out is Serve's own cost of an item, see `bench control`.
Called by fleet_coordinator.py.
"""

import asyncio
import re
import time

from tailrace.deployments.coordinator.rollouts import Rollouts

HEAD = re.compile(rb'{"epoch": "([^"]*)", "number": (\d+)')


class Reader:
    """One board's stream, up to where Serve would take its items away, which are bytes by then."""

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
    """Takes the place of the feed's look, and times it."""

    def __init__(self, rollouts: Rollouts):
        self._feed, self._look, self.own_s, self.longest_s, self.count = rollouts.feed, rollouts.feed._look, 0.0, 0.0, 0
        self._feed._look = self

    def __call__(self) -> None:
        began_s = time.thread_time()
        self._look()
        took_s = time.thread_time() - began_s
        self.own_s, self.longest_s, self.count = self.own_s + took_s, max(self.longest_s, took_s), self.count + 1


async def watched(rollouts: Rollouts, boards: int, seconds: float) -> dict:
    """Figures of `boards` boards that watch for so long."""
    looks, readers = TimedLooks(rollouts), [Reader(rollouts) for _ in range(boards)]
    tasks = [asyncio.ensure_future(reader.run()) for reader in readers]
    await asyncio.sleep(2.0)  # the first look finds all rows new
    began_s, cpu_s = time.monotonic(), time.thread_time()
    looks.own_s = looks.longest_s = looks.count = 0
    sent = sum(reader.bytes for reader in readers)
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began_s
    for task in tasks:
        task.cancel()
    return {
        "boards": boards,
        "board_share": round(looks.own_s / took_s, 4),
        "board_look_ms": round(1e3 * looks.own_s / max(1, looks.count), 2),
        "board_look_max_ms": round(1e3 * looks.longest_s, 2),
        "board_looks_per_s": round(looks.count / took_s, 2),
        "board_bytes_per_s": round((sum(reader.bytes for reader in readers) - sent) / boards / took_s),
        "loop_share_with_boards": round((time.thread_time() - cpu_s) / took_s, 3),
    }
