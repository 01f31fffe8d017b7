"""Of the pool's admin client: who waits for it can be stopped at every instant."""

import asyncio
import threading
import time

import pytest

from tailrace.kvpool.admin import PoolAdmin


def test_a_cancellation_as_the_answer_comes_is_not_lost():
    """In the loop's turn in which the answer has come and nobody has been woken yet. Lost, the watch over the master
    would go on, and whoever stops it would wait for ever."""

    async def cancelled_then() -> None:
        admin, answered = PoolAdmin("127.0.0.1", "127.0.0.1:1", "127.0.0.1:2", "tcp", ""), threading.Event()
        waiting = asyncio.create_task(admin._in_time(answered.wait, 30.0))
        await asyncio.sleep(0.01)
        answered.set()
        while admin._threads._work_queue.qsize() or not answered.is_set():
            time.sleep(0.001)
        time.sleep(0.05)  # the thread hands its answer over; this loop does not turn meanwhile
        asyncio.get_running_loop().call_soon(waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        admin.close()

    asyncio.run(cancelled_then())
