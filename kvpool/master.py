"""KvMaster: runs mooncake_master on its node, knows the stores that reported, and operates on the whole pool.

Invariant: its address never changes while its first node lives. The ports are constructor arguments, so a restarted
process and, on that node, a restarted actor listen on the same ports; then all keys are gone, the stores mount again,
clients connect again. On another node a restarted actor has another address, which its answers to the stores contain. A
plain class: kvpool/pool.py makes the actor. Called by the coordinator and by the stores.
"""

import asyncio
import logging
import time
from collections import Counter
from contextlib import suppress

from tailrace.kvpool.admin import PoolAdmin
from tailrace.kvpool.child_process import ChildProcess, Launch
from tailrace.kvpool.departures import Departures
from tailrace.kvpool.keys import is_block, version_of
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.kvpool.programs import program
from tailrace.kvpool.status import MasterAnswer, PoolDown, PoolStatus, StoreNodeStatus

CLIENT_TTL_S = 3
"""Seconds without a ping after which a store counts as lost, and its keys with it; until then requests for them
fail.
"""

DISCARD_S, RELEASE_S = 30, 60
"""Seconds after which an unfinished put is given up and its bytes are used again: longer than Mooncake's 30 s for a
transfer, lest a slow writer write into another key. A move's old copy waits as long (upstream's default: 600 s).
"""

EVICTION_RATIO = 0.95
"""Share of memory above which Mooncake evicts. The core releases KV before, at 0.9, because it knows which samples are
needed last.
"""

REPORT_S = 2.0
"""Seconds between two reads of the master, and two reports of a store, and so the delay until the blocks of a dead
store count as lost. Each costs 2 to 4 ms of a core.
"""

UNMOUNTED_S = 0.5
"""The same while a store's memory is not mounted: engines wait for it."""

STALE_S = 10.0

PUT_FAILURES = (
    "master_put_start_failures_total",
    "master_batch_put_start_failed_items_total",
    "master_put_end_failures_total",
    "master_batch_put_end_failed_items_total",
)
GET_FAILURES = ("master_get_replica_list_failures_total", "master_batch_get_replica_list_failed_items_total")


COUNTS = (
    "master_key_count",
    "master_allocated_bytes",
    "master_total_capacity_bytes",
    "master_allocated_file_size_bytes",
    "master_total_file_capacity_bytes",
    "master_evicted_key_count_total",
    *PUT_FAILURES,
    *GET_FAILURES,
)


class KvMaster:
    """Operations raise PoolDown, in one line, while the master process cannot be reached. Needs a running loop."""

    def __init__(self, config: PoolConfig, host: str, rpc_port: int, pages_port: int):
        self.address = f"{host}:{rpc_port}"
        self._config, self._host, self._rpc_port, self._pages_port = config, host, rpc_port, pages_port
        self._process = ChildProcess("mooncake_master", self._launch)
        pages = f"{host}:{pages_port}"
        self._admin = PoolAdmin(host, self.address, pages, config.protocol, config.rdma_devices)
        self._departures = Departures(self._up)
        self._mounted: frozenset[str] | None = None
        self._reports: dict[str, tuple[float, StoreNodeStatus]] = {}
        self._asked = asyncio.Event()  # a store waits for the next look
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def where(self) -> str:
        """Returns host:port of the master's RPC."""
        return self.address

    async def report(self, store: StoreNodeStatus, segment: str) -> MasterAnswer:
        """Takes a store's report."""
        self._reports[store.node_id] = time.monotonic(), store
        if not store.segment:
            self._asked.set()
        may_end = self._departures.see(segment, store.leaving)
        if may_end:
            del self._reports[store.node_id]
        return MasterAnswer(
            master_address=self.address,
            mounted=None if self._mounted is None else segment in self._mounted,
            may_end=may_end,
        )

    async def release(self, keys: list[str]) -> tuple[int, list[str]]:
        """Removes these keys. Returns the number of removed keys, and the keys in use, for which the call must be
        repeated.
        """
        return await self._up().release(keys)

    async def retire(self, regex: str) -> int:
        """Removes all keys that match the expression, except those in use. Returns their number."""
        return await self._up().retire(regex)

    async def move(self, keys: list[str], segment: str) -> list[str]:
        """Starts to move the DRAM copies of these keys to a segment. Returns the keys whose move began."""
        return await self._up().move(keys, segment)

    async def status(self) -> PoolStatus:
        """Returns counts and bytes as of now."""
        counts, segment_bytes = await self._up().metrics(COUNTS)
        fresh_s = time.monotonic() - STALE_S
        return PoolStatus(
            master_address=self.address,
            pages_address=f"{self._host}:{self._pages_port}",
            master_pid=self._process.pid,
            master_restarts=self._process.restarts,
            keys=int(counts["master_key_count"]),
            dram_bytes=int(counts["master_allocated_bytes"]),
            dram_capacity_bytes=int(counts["master_total_capacity_bytes"]),
            ssd_bytes=int(counts["master_allocated_file_size_bytes"]),
            ssd_capacity_bytes=int(counts["master_total_file_capacity_bytes"]),
            segment_bytes=segment_bytes,
            evicted_keys=int(counts["master_evicted_key_count_total"]),
            put_failures=int(sum(counts[name] for name in PUT_FAILURES)),
            get_failures=int(sum(counts[name] for name in GET_FAILURES)),
            store_nodes=tuple(store for at_s, store in self._reports.values() if at_s > fresh_s),
            **self._departures.counts,
        )

    async def keys_by_version(self) -> dict[int, int]:
        """Returns the number of keys of each weights version; reads every key."""
        return dict(sorted(Counter(version_of(key) for key in await self._up().keys() if is_block(key)).items()))

    async def stop(self) -> None:
        """Ends the process for good."""
        self._looking.cancel()
        await self._departures.stop()
        await asyncio.gather(self._looking, return_exceptions=True)  # it uses the admin client until it has ended
        self._admin.close()
        await asyncio.to_thread(self._process.stop)

    def _up(self) -> PoolAdmin:
        if self._process.pid is None:  # then no call must wait to find out
            raise PoolDown(f"mooncake_master is not running: {self._process.last_line()}")
        return self._admin

    async def _look(self) -> None:
        while True:
            try:
                self._mounted = frozenset(await self._up().segments())
                await self._admin.connect()
            except PoolDown:
                self._mounted = None
            except Exception as error:  # noqa: BLE001 - an odd answer of the master: it is asked again
                self._mounted = None
                logging.getLogger(__name__).warning("segments of the pool: %r", error)
            await asyncio.sleep(UNMOUNTED_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S - UNMOUNTED_S):
                    await self._asked.wait()
            self._asked.clear()

    def _launch(self) -> Launch:
        lease_ms = int(self._config.load_deadline_s * 1000)  # keys that are being read are not evicted
        options = {
            "rpc_address": self._host,
            "rpc_port": self._rpc_port,
            "metrics_host": self._host,
            "metrics_port": self._pages_port,
            "client_ttl": CLIENT_TTL_S,
            "default_kv_lease_ttl": lease_ms,
            "put_start_discard_timeout_sec": DISCARD_S,
            "put_start_release_timeout_sec": RELEASE_S,
            "eviction_high_watermark_ratio": EVICTION_RATIO,
            "enable_offload": str(self._config.ssd_path is not None).lower(),
            "enable_metric_reporting": "false",
            "logtostderr": "true",
        }
        return program("mooncake_master", options), {}
