"""KvStoreNode: runs mooncake_client on one node, which lends the pool that node's memory and, if configured, its SSD.

Invariant: its segment keeps its name over restarts, and it leaves no files: the SSD tier is one file whose name is
removed as soon as the process has it open, so its bytes are free when the process ends, however it ends. A lost store
is a lost cache. A plain class: kvpool/pool.py makes the actor, one per node.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tailrace.kvpool.child_process import ChildProcess, Launch
from tailrace.kvpool.master import REPORT_S, UNMOUNTED_S
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.kvpool.programs import program
from tailrace.kvpool.status import MasterAnswer, PoolDown, StoreNodeStatus

REMOUNT_S = 20.0
"""Seconds after which a store whose segment the master does not know is restarted; it mounts again within about 3 s."""

SSD_FILE = "kv_cache.data"
SSD_BUFFER_BYTES = 128 * 2**20
"""Bytes of the buffer for reads from the SSD; upstream's 1.25 GB would be taken from the node at once."""

FIRST_LEASE_S = 1800.0
"""Seconds of an engine's first lease: it renews the lease once it has loaded its model, which may take that long."""

Report = Callable[[StoreNodeStatus, str], Awaitable[MasterAnswer | None]]
"""KvMaster.report, on whatever node; None while it is being restarted."""


class KvStoreNode:
    """`port` names the segment, `host:port`; other nodes read keys on the SSD there."""

    def __init__(self, config: PoolConfig, node_id: str, master_address: str, host: str, port: int, report: Report):
        self._config, self._node_id, self._master_address = config, node_id, master_address
        self._host, self._port, self._report = host, port, report
        self.segment = f"{host}:{port}"
        self._folder, self._ssd = ssd_folder(config)
        self._is_mounted = asyncio.Event()
        self._leases = {"": time.monotonic() + FIRST_LEASE_S}  # by holder: end of its lease
        self._process = ChildProcess("mooncake_client", self._launch)

    async def endpoint(self, deadline_s: float, holder: str = "engine", lease_s: float = FIRST_LEASE_S) -> PoolEndpoint:
        """Returns the endpoint for an engine on this node, once the segment is mounted. Raises PoolDown after
        `deadline_s`.

        The store stays for `lease_s` from now, for this `holder`, which renews its lease by calling again.
        """
        now_s = time.monotonic()
        current = {name: until_s for name, until_s in self._leases.items() if name and until_s > now_s}
        self._leases = current | {holder: now_s + lease_s}
        try:
            async with asyncio.timeout(deadline_s):
                await self._is_mounted.wait()
        except TimeoutError:
            said = self._process.last_line()
            raise PoolDown(f"no pool memory on {self._host} after {deadline_s:.0f} s: {said}") from None
        return PoolEndpoint(self._master_address, self._host, self.segment, self._config)

    async def leave(self) -> None:
        """Starts to leave, unless a holder renews its lease first."""
        self._leases = {"": time.monotonic()}

    async def run(self) -> None:
        """Reports, and watches the process.

        Returns when it is no longer needed and its keys are elsewhere. Raises the report's error if the master is gone.
        """
        known_s = time.monotonic()
        while True:
            answer = await self._report(self._status(), self.segment)
            if answer is not None and answer.may_end and self._is_leaving():
                return
            if answer is not None and answer.master_address != self._master_address:
                self._master_address = answer.master_address
                self._process.kill()  # it is started again with this address
                answer = None
            mounted = None if answer is None else answer.mounted
            if mounted is not False:
                known_s = time.monotonic()
            elif time.monotonic() - known_s > REMOUNT_S:
                self._process.kill()
                known_s = time.monotonic()
            if mounted:
                self._is_mounted.set()
                self._forget_file()
            else:
                self._is_mounted.clear()
            await asyncio.sleep(REPORT_S if mounted else UNMOUNTED_S)

    async def stop(self) -> None:
        """Ends the process for good."""
        await asyncio.to_thread(self._process.stop)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _status(self) -> StoreNodeStatus:
        return StoreNodeStatus(
            node_id=self._node_id,
            host=self._host,
            segment=self.segment if self._is_mounted.is_set() else "",
            pid=self._process.pid,
            restarts=self._process.restarts,
            ssd=self._ssd,
            leaving=self._is_leaving(),
        )

    def _is_leaving(self) -> bool:
        """Returns whether no engine is on this node any more."""
        return max(self._leases.values()) <= time.monotonic()

    def _forget_file(self) -> None:
        """Removes the SSD file's name once the process has it open; it never opens it again (Mooncake 0.3.13)."""
        pid = self._process.pid
        file = None if self._folder is None else self._folder / SSD_FILE
        if pid is None or file is None or not file.exists():
            return
        try:
            is_open = any(link.is_symlink() and link.readlink() == file for link in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # it has just ended, or closed a file meanwhile
            return
        if is_open:
            shutil.rmtree(self._folder)

    def _launch(self) -> Launch:
        options = {
            "host": self.segment,
            "port": self._port,
            "master_server_address": self._master_address,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": int(self._config.dram_gib * 2**30),
            "protocol": self._config.protocol,
            "device_names": self._config.rdma_devices,
        }
        if self._folder is None:
            return program("mooncake_client", options), {}
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # The server that is not started would listen on every interface; the one on `port` does the same.
        options |= {"enable_offload": "true", "start_offload_rpc_server": "false"}
        settings = {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self._folder),
            # The bucket backend writes no bucket before it is full, file_per_key wrote 2 keys of 20.
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "offset_allocator_storage_backend",
            "MOONCAKE_OFFSET_EVICTION_POLICY": "fifo",
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(int(self._config.ssd_gib * 2**30)),
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(SSD_BUFFER_BYTES),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        }
        return program("mooncake_client", options), settings


def ssd_folder(config: PoolConfig) -> tuple[Path | None, str]:
    """Returns a new folder for one store, and `on`, `off`, or in one line why there is none: an SSD is never
    required.
    """
    if config.ssd_path is None:
        return None, "off"
    path = Path(config.ssd_path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(path).free / 2**30
        if free_gib < config.ssd_gib:
            return None, f"{path}: {free_gib:.1f} GiB free, ssd_gib asks for {config.ssd_gib:.1f}"
        return Path(tempfile.mkdtemp(prefix="tailrace-", dir=path.resolve())), "on"  # mkdtemp: mode 0700
    except OSError as error:
        return None, f"{path}: {error.strerror}"
