"""Benchmark of the pool's master: cost of a key in put, look-up, get and remove, in batches as engines send them.

The master is the pool's own, over loopback, with one store that lends it memory. Values are small, so that the cost is
that of keys; a key is as long as an engine's. Invariant: what was started is stopped. Called by
lab/benchmarks/control_plane/control.py.
"""

import asyncio
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from tailrace.kvpool.keys import PREFIX
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.lab.benchmarks.control_plane.rpc_latency import spread_us
from tailrace.lab.benchmarks.pool.pool_testbed import run, running_pool
from tailrace.lab.benchmarks.pool.transport import expect, store_client

BATCH = 64
VALUE = bytes(64)
IDLE_S = 1.0
"""Seconds for which the idle master is measured. The share of a core that it uses then is subtracted from the figures
of the operations.
"""


def measure(keys: int, say: Callable[[str], None]) -> dict:
    """Returns microseconds per key by operation, and the master's bytes per key. `client_us`: the client's wait, by
    batch. `master_us`: the master's processor time.

    Raises Failed, in one line, when the pool does not start.
    """
    say("starting a pool")
    return run(_measure(keys, say))


async def _measure(keys: int, say: Callable[[str], None]) -> dict:
    async with running_pool(PoolConfig(dram_gib=1.0)) as pool:
        while (pid := (await pool.master.status()).master_pid) is None:
            await asyncio.sleep(0.1)
        found = await asyncio.to_thread(_operations, pool.endpoint, ObservedProcess(pid), keys)
    say(f"pool_key: {found}")
    return found


class ObservedProcess:
    """Figures of a process by the kernel, from /proc."""

    def __init__(self, pid: int):
        self._folder = Path(f"/proc/{pid}")

    @property
    def cpu_s(self) -> float:
        """Processor seconds so far, user and system, in ticks of 10 ms."""
        fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        return int((self._folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _operations(pool: PoolEndpoint, master: ObservedProcess, count: int) -> dict:
    store = store_client(pool)
    keys = [f"{PREFIX}-{'0' * 16}@{sha256(str(number).encode()).hexdigest()}" for number in range(count)]
    began_s = master.cpu_s
    time.sleep(IDLE_S)
    idle_share = (master.cpu_s - began_s) / IDLE_S
    operations = {
        "put": lambda batch: store.put_batch(batch, [VALUE] * len(batch)) == 0,
        "exist": lambda batch: store.batch_is_exist(batch) == [1] * len(batch),
        "get": lambda batch: store.get_batch(batch) == [VALUE] * len(batch),
        "remove": lambda batch: store.batch_remove(batch, force=True) == [0] * len(batch),
    }
    found: dict = {"key_characters": len(keys[0]), "batch": BATCH, "keys": count}
    for name, operation in operations.items():
        before_bytes, busy_s, began_s, times_s = master.resident_bytes, master.cpu_s, time.perf_counter(), []
        for first in range(0, count, BATCH):
            batch, asked_s = keys[first : first + BATCH], time.perf_counter()
            expect(operation(batch), name)
            times_s.append((time.perf_counter() - asked_s) / len(batch))
        busy_s = master.cpu_s - busy_s - idle_share * (time.perf_counter() - began_s)
        found[name] = {"client_us": spread_us(times_s), "master_us": round(1e6 * max(0.0, busy_s) / count, 1)}
        if name == "put":
            found["bytes_per_key"] = round((master.resident_bytes - before_bytes) / count)
    store.close()
    return found
