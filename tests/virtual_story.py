"""A story in virtual time, without a cluster: it leaves no error of a callback, and its tasks are ended after it."""

import asyncio
from collections.abc import Awaitable, Callable

from tailrace.lab.fuzz.virtual_time import VirtualLoop


def play_in(loop: VirtualLoop, story: Callable[[], Awaitable]) -> object:
    """Runs `story()` on the loop, and closes it. Returns its answer."""
    try:
        answer = loop.run_until_complete(story())
        assert loop.errors == []
        return answer
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
