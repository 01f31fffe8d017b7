"""What an item of a stream costs, whoever carries it: processor time on both sides, and how late it arrives.

The other side sends items without a pause, then APART_S apart: an item that finds its reader asleep costs more than one
of many. Both sides read one machine's clock. Called by lab/benchmarks/control_plane/control_ray.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tailrace.lab.benchmarks.control_plane.rpc_latency import WARM_UP, spread_us

ITEM_BYTES = 1_024
APART_S = 0.005
MOST_APART = 1_000
"""Items APART_S apart: five seconds of them."""

Stream = Callable[[int, float], AsyncIterator[tuple[float, bytes]]]
"""A new stream of so many items, so many seconds apart: each is the time it was sent at, and ITEM_BYTES."""


async def sent_items(count: int, apart_s: float) -> AsyncIterator[tuple[float, bytes]]:
    """The sender's side of a stream."""
    item = bytes(ITEM_BYTES)
    for _ in range(count):
        if apart_s:
            await asyncio.sleep(apart_s)
        yield time.time(), item


async def cost_of_stream(stream: Stream, count: int, sender_s: Callable[[], Awaitable[float]]) -> dict:
    """Of `count` items in a row, and of as many or MOST_APART apart, whose delays are taken. `sender_s`: processor
    seconds that the sending process has used so far."""
    await _read(stream, WARM_UP, 0.0)
    delays_s, apart = await _measured(stream, min(count, MOST_APART), APART_S, sender_s)
    _, in_a_row = await _measured(stream, count, 0.0, sender_s)
    return {"item_bytes": ITEM_BYTES, "delay_us": spread_us(delays_s), **in_a_row, "apart": {"s": APART_S, **apart}}


async def _measured(stream: Stream, count: int, apart_s: float, sender_s) -> tuple[list[float], dict]:
    sender_began_s = await sender_s()
    began_s, busy_s = time.perf_counter(), time.process_time()
    delays_s = await _read(stream, count, apart_s)
    took_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
    of_sender_s = await sender_s() - sender_began_s
    return delays_s, {
        "items_per_s": round(count / took_s, 1),
        "caller_us": round(1e6 * busy_s / count, 1),
        "callee_us": round(1e6 * of_sender_s / count, 1),
    }


async def _read(stream: Stream, count: int, apart_s: float) -> list[float]:
    """How late each item of a new stream was."""
    return [time.time() - sent_s async for sent_s, _ in stream(count, apart_s)]
