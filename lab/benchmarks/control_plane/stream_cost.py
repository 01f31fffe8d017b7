"""Cost of an item of a stream, whatever carries it: processor time on both sides, and the delay of its arrival.

The sender sends items APART_S apart, then others without a pause: an item that finds its reader asleep costs more than
one of many. Both sides read the clock of one machine. Called by lab/benchmarks/control_plane/control_ray.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from tailrace.lab.benchmarks.control_plane.rpc_latency import WARM_UP, spread_us

ITEM_BYTES = 1_024
APART_S = 0.005
MOST_APART = 1_000
"""Maximum number of items that are sent APART_S apart: five seconds of them."""

Stream = Callable[[int, float], AsyncIterator[tuple[float, bytes]]]
"""A function that opens a stream of so many items, so many seconds apart. An item is the unix time at which it was
sent, and ITEM_BYTES bytes.
"""


async def sent_items(count: int, apart_s: float) -> AsyncIterator[tuple[float, bytes]]:
    """Yields `count` items, `apart_s` seconds apart: the sender's side of a stream."""
    item = bytes(ITEM_BYTES)
    for _ in range(count):
        if apart_s:
            await asyncio.sleep(apart_s)
        yield time.time(), item


async def cost_of_stream(stream: Stream, count: int, sender_s: Callable[[], Awaitable[float]]) -> dict:
    """Returns the cost of `count` items in a row, and of at most MOST_APART items that are sent apart, whose delays are
    measured. `sender_s`: returns the processor seconds that the sending process has used so far.
    """
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
    """Returns the delay of each item of a new stream, in seconds."""
    return [time.time() - sent_s async for sent_s, _ in stream(count, apart_s)]
