"""Full collections of Python's garbage, at times that we choose.

Invariant: a collection runs when the service has just become idle, and at the latest EVERY_S after the one before.
Python itself would start one whenever a quarter more objects live, in the middle of a step. Awaited by the coordinator.
"""

import asyncio
import gc
from collections.abc import Callable

EVERY_S = 600.0
"""Maximum seconds between two collections. One holds the loop for 1.2 s with 32,768 samples running (`tailrace bench
fleet`): 0.2 % of the chunk ends wait for it. The records of samples that have ended until then, 66 a second and 1 KB
each, take 40 MB.
"""

LOOK_S = 2.0

NEVER = 1 << 30


async def collect_garbage(is_idle: Callable[[], bool]) -> None:
    """Runs collections. Never returns; the young generations are collected as before."""
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)
    now = asyncio.get_running_loop().time
    collected_s, was_idle = now(), True
    while True:
        await asyncio.sleep(LOOK_S)
        idle = is_idle()
        if (idle and not was_idle) or now() >= collected_s + EVERY_S:
            gc.collect()
            collected_s = now()
        was_idle = idle
