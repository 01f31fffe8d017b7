"""A relay on loopback that is as slow as a link between two sites, for ranks far from a gateway. Called by `ranks`.

The relay carries a maximum of bytes a second towards the gateway, and delays all bytes in both directions. Losses and
the slow start of TCP connections are not modelled.
"""

import asyncio
import threading
from collections.abc import Callable

PART_BYTES = 64 << 10

LATE_S = 0.05
"""Seconds by which a wake-up of the relay may be late without lowering the rate of the link."""


class SlowLink:
    """A relay on a separate thread, which runs while its context lasts. `port`: port on loopback to which the relay
    leads. `mbit`: maximum Mbit/s of all connections together, towards that port. `delay_s`: seconds of delay one way.
    `carried`: bytes carried towards the port so far. `address`: host and port of the relay.
    """

    def __init__(self, port: int, mbit: float, delay_s: float = 0.0):
        self._port, self._bytes_per_s, self._delay_s = port, mbit * 1e6 / 8, delay_s
        self.carried, self._free_s = 0, 0.0
        self._loop = asyncio.new_event_loop()
        self._writers: list[asyncio.StreamWriter] = []

    def __enter__(self) -> "SlowLink":
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="slow link")
        self._thread.start()
        starting = asyncio.start_server(self._relay, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += writer, back
        pumps = self._pump(reader, back, self._wait), self._pump(there, writer, _no_wait)
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait: Callable) -> None:
        while part := await reader.read(PART_BYTES):
            await wait(len(part))
            self._loop.call_later(self._delay_s, writer.write, part)
        self._loop.call_later(self._delay_s, writer.close)

    async def _wait(self, count: int) -> None:
        """Waits until the link has carried `count` more bytes, after all earlier ones."""
        self.carried += count
        self._free_s = max(self._free_s, self._loop.time() - LATE_S) + count / self._bytes_per_s
        await asyncio.sleep(self._free_s - self._loop.time())


async def _no_wait(count: int) -> None:
    """Does not wait: the direction from the gateway carries short answers."""
