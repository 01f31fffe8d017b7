"""Cost of a call, whatever is called: round trip of a call alone, calls per second, and processor time.

Round trips are measured one after another. Then IN_FLIGHT calls are under way at a time. Processor time is that of all
threads of a process in this second part, divided by its number of calls. Called by
lab/benchmarks/control_plane/control.py and its parts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

IN_FLIGHT = 64
WARM_UP = 20
"""Number of calls before those that are measured: the first ones open connections."""


def spread_us(times_s: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile in microseconds."""
    times_us = 1e6 * np.asarray(times_s)
    return {"median": round(float(np.quantile(times_us, 0.5)), 1), "p99": round(float(np.quantile(times_us, 0.99)), 1)}


async def cost_of(
    call: Callable[[], Awaitable], count: int, callee_s: Callable[[], Awaitable[float]] | None = None
) -> dict:
    """Returns the cost of `count` calls one after another, then of `count` calls with IN_FLIGHT under way at a time.
    `callee_s`: returns the processor seconds that the called process has used so far.
    """
    for _ in range(WARM_UP):
        await call()
    alone_s = [await _timed(call) for _ in range(count)]
    callee_began_s = await callee_s() if callee_s else 0.0
    began_s, busy_s = time.perf_counter(), time.process_time()
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await call()

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))
    took_s, busy_s = time.perf_counter() - began_s, time.process_time() - busy_s
    found = {
        "round_trip_us": spread_us(alone_s),
        "calls_per_s": round(count / took_s, 1),
        "caller_us": round(1e6 * busy_s / count, 1),
    }
    if callee_s:
        found["callee_us"] = round(1e6 * (await callee_s() - callee_began_s) / count, 1)
    return found


async def _timed(call: Callable[[], Awaitable]) -> float:
    began_s = time.perf_counter()
    await call()
    return time.perf_counter() - began_s
