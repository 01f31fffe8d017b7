"""Of the pool's admin client: who waits for it can be stopped at every instant; what is read of a page of metrics."""

import asyncio
import threading
import time

import pytest

from tailrace.kvpool.admin import PoolAdmin, read_metrics


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


PAGE = """\
# HELP master_key_count Total number of keys
# TYPE master_key_count gauge
master_key_count 12
# HELP master_evicted_key_count Evicted
# TYPE master_evicted_key_count counter
master_evicted_key_count 3
# TYPE master_put_start_failures_total counter
master_put_start_failures_total 5
# TYPE master_value_size_bytes histogram
master_value_size_bytes_bucket{le="4096"} 7
master_value_size_bytes_sum 9
# TYPE segment_allocated_bytes gauge
segment_allocated_bytes{segment="10.0.0.1:17"} 4096
segment_allocated_bytes{segment="10.0.0.2:17"} 0
this is no line of metrics
"""


def test_the_wanted_counts_of_a_page_are_read_and_nothing_else_of_it():
    names = ("master_key_count", "master_evicted_key_count_total", "master_put_start_failures_total")
    counts, segments = read_metrics(PAGE, names)
    assert counts == dict(zip(names, (12.0, 3.0, 5.0), strict=True))
    assert segments == {"10.0.0.1:17": 4096, "10.0.0.2:17": 0}
