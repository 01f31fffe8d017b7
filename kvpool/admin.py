"""Operations on the whole pool: a Mooncake client without memory of its own, and the master's HTTP pages.

Invariant: nothing here blocks the event loop, and no single call of the client or of a page is awaited for longer than
CALL_S; `move` and `keys_at` make several. A dead master makes a call of the client take 4.3 s and its setup 90 s
(Mooncake 0.3.13), so all calls run on separate threads. Owned by KvMaster. Moving KV from memory to the SSD is not
among the operations: only the client that put a key may clear its copies. Mooncake does it by itself when memory is
full; copies on the SSD are still found then.
"""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tailrace.kvpool.status import PoolDown

CALL_S = 3.0
HTTP_S = 1.0
THREADS = 4
"""Number of threads. Calls that exceed their deadline hold a thread until Mooncake gives up."""

SEGMENT_BYTES = "segment_allocated_bytes"

UNREACHABLE = -900
"""Mooncake's error code RPC_FAIL (mooncake-store/include/types.h)."""

KEYS_A_CALL = 1000

IN_USE = {-703, -706, -714}
"""Codes of keys that are being written, leased (looking a key up or reading it takes a lease), or copied. Removing such
a key by force would give its memory to another while it is read; without force, a reader whose lease has run out gets
an error.
"""


class PoolAdmin:
    """Every operation raises PoolDown, in one line, if the master does not answer."""

    def __init__(self, host: str, master_address: str, pages_address: str, protocol: str, devices: str):
        self._setup = (host, "P2PHANDSHAKE", 0, 0, protocol, devices, master_address)
        self._pages = f"http://{pages_address}"
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pool-admin")
        self._client: Any = None
        self._connecting: asyncio.Future | None = None

    async def connect(self) -> None:
        """Starts to connect if that has not been done; call it again until operations succeed. Never waits."""
        if self._client is None and (self._connecting is None or self._connecting.done()):
            self._connecting = asyncio.get_running_loop().run_in_executor(self._threads, self._connect)

    async def release(self, keys: list[str]) -> tuple[int, list[str]]:
        """Removes keys. Returns the number of removed keys, and the keys in use: repeat the call for those, see
        IN_USE.
        """
        codes = await self._call(lambda client: _reached(client.batch_remove(keys, force=False))) if keys else []
        in_use = [key for key, code in zip(keys, codes, strict=True) if code in IN_USE]
        return sum(code == 0 for code in codes), in_use

    async def retire(self, regex: str) -> int:
        """Removes all keys that match the expression (C++ std::regex_search), except those in use. Returns their
        number.
        """
        (count,) = await self._call(lambda client: _reached([client.remove_by_regex(regex, force=False)]))
        return max(0, count)

    async def move(self, keys: list[str], segment: str) -> list[str]:
        """Starts to move keys to a segment. Returns the keys whose move began: not those that are there already, only
        on SSD, or refused by the master.

        The stores do it within about a second. The old copy's bytes are free after RELEASE_S (kvpool/master.py).
        """
        names = {row["te_endpoint"]: row["segment_name"] for row in (await self._segments_detail())}
        begun: list[str] = []
        for first in range(0, len(keys), KEYS_A_CALL):
            part = keys[first : first + KEYS_A_CALL]
            begun += await self._call(lambda client, part=part: _move(client, part, segment, names))
        return begun

    async def keys_at(self, segment: str) -> dict[str, int]:
        """Returns the keys whose only copy in memory is in a segment, with their bytes; reads every key of the pool."""
        keys = await self.keys()
        ends = {row["te_endpoint"] for row in await self._segments_detail() if row["segment_name"] == segment}
        found: dict[str, int] = {}
        for first in range(0, len(keys), KEYS_A_CALL):
            part = keys[first : first + KEYS_A_CALL]
            found |= await self._call(lambda client, part=part: _only_at(client, part, ends))
        return found

    async def segments(self) -> dict[str, str]:
        """Returns the mounted segments by name, each with the address of its bytes."""
        return {row["segment_name"]: row["te_endpoint"] for row in await self._segments_detail()}

    async def keys(self) -> list[str]:
        """Returns every key; a page of 150 bytes a key, so call it rarely."""
        return (await self._page("/get_all_keys")).split()

    async def metrics(self, names: Collection[str]) -> tuple[dict[str, float], dict[str, int]]:
        """Returns the master's counters with these names, all with `_total`, and allocated bytes by segment."""
        return read_metrics(await self._page("/metrics"), names)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _connect(self) -> None:
        from mooncake.store import MooncakeDistributedStore  # a large library: on this thread, not at import

        client = MooncakeDistributedStore()
        if client.setup(*self._setup) == 0:
            self._client = client

    async def _call(self, work: Callable[[Any], Any]) -> Any:
        if self._client is None:
            raise PoolDown("the pool's master is not connected yet")

        def twice() -> Any:
            try:
                return work(self._client)
            except PoolDown:  # the first call to a restarted master finds its old connection closed
                return work(self._client)

        return await self._in_time(twice, CALL_S)

    async def _segments_detail(self) -> list[dict]:
        return json.loads(await self._page("/get_segments_detail"))["segments"]

    async def _page(self, path: str) -> str:
        def read() -> str:
            with urllib.request.urlopen(self._pages + path, timeout=HTTP_S) as answer:
                return answer.read().decode()

        try:
            return await self._in_time(read, CALL_S)
        except (OSError, HTTPException) as error:
            raise PoolDown(f"the pool's master does not answer: {error}") from None

    async def _in_time(self, work: Callable[[], Any], deadline_s: float) -> Any:
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            async with asyncio.timeout(deadline_s):  # Python 3.11's wait_for can swallow a cancellation
                return await running
        except TimeoutError:
            raise PoolDown(f"the pool's master did not answer within {deadline_s:.0f} s") from None


def read_metrics(page: str, names: Collection[str]) -> tuple[dict[str, float], dict[str, int]]:
    """Reads counters from a page of metrics; only the lines of these names are parsed, as the page has hundreds."""
    counts, segment_bytes = {}, {}
    families = {name.removesuffix("_total") for name in (*names, SEGMENT_BYTES)}
    lines = (line for line in page.splitlines() if _family(line) in families)
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if not sample.labels:
                counts[sample.name] = sample.value  # the parser adds a missing `_total`
            elif sample.name == SEGMENT_BYTES:
                segment_bytes[sample.labels["segment"]] = int(sample.value)
    return counts, segment_bytes


def _family(line: str) -> str:
    """Returns the name of the metric in a line of a page of metrics; empty for a line of help."""
    if line.startswith("#"):
        parts = line.split(maxsplit=3)
        return parts[2].removesuffix("_total") if parts[1:2] == ["TYPE"] else ""
    return line.partition("{")[0].partition(" ")[0].removesuffix("_total")


def _move(client: Any, keys: list[str], segment: str, names: dict[str, str]) -> list[str]:
    begun = []
    for key, copies in client.batch_get_replica_desc(keys).items():
        ends = [
            copy.get_memory_descriptor().buffer_descriptor.transport_endpoint
            for copy in copies
            if copy.is_memory_replica()
        ]
        sources = [names[end] for end in ends if end in names]
        if sources and segment not in sources:
            _, code = client.create_move_task(key, sources[0], segment)
            if _reached([code]) == [0]:
                begun.append(key)
    return begun


def _only_at(client: Any, keys: list[str], ends: set[str]) -> dict[str, int]:
    found = {}
    for key, copies in client.batch_get_replica_desc(keys).items():
        buffers = [copy.get_memory_descriptor().buffer_descriptor for copy in copies if copy.is_memory_replica()]
        if buffers and all(buffer.transport_endpoint in ends for buffer in buffers):
            found[key] = buffers[0].size
    return found


def _reached(codes: list[int]) -> list[int]:
    if UNREACHABLE in codes:
        raise PoolDown("the pool's master does not answer")
    return codes
