"""Connections to one gateway, shared by calls from any thread and any event loop.

They belong to an event loop on a thread of its own, so a caller may use an event loop for each call, or block one.
Called by `app.http.client`.
"""

import asyncio
import socket
import ssl
import threading
import weakref

import httpx

CONNECT_S = 10.0
"""Longest wait for a connection. An answer may take as long as a sample."""

KEPT_IDLE = 64
"""Connections that wait for the next request. Each costs the gateway a file descriptor."""

SILENT_S, PROBES = 30, 4
"""Seconds of silence after which a peer is probed, and probes, as far apart, after which it is given up."""


class Connections:
    """`url`: of the gateway. `token`: for its door, or None. `max_open`: requests at once; others wait here.
    `transport`: httpx's, in place of sockets. `close()` ends all of them; so does the garbage collector.
    """

    def __init__(self, url: str, token: str | None, max_open: int, transport: httpx.AsyncBaseTransport | None = None):
        self._pool = Pool(url, token, max_open, transport)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(self._loop,), daemon=True, name="http")
        thread.start()
        self.close = weakref.finalize(self, _close, self._loop, self._pool, thread)

    async def ask(self, method: str, path: str, body: dict | None, headers: dict) -> httpx.Response:
        """The answer, of any status. Raises httpx.TransportError. A call that is cancelled closes its connection."""
        if not self.close.alive:
            raise RuntimeError("the client is closed; make another")
        asked = self._pool.ask(method, path, body, headers)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))


class Pool:
    """The connections themselves, each a client of httpx: its own pool takes time in proportion to all connections and
    all that wait for one, at each request (httpcore 1.0: 22 ms with 64 connections and 1,500 requests).
    """

    def __init__(self, url: str, token: str | None, max_open: int, transport: httpx.AsyncBaseTransport | None):
        self._url, self._transport = url, transport
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._tls = ssl.create_default_context() if url.startswith("https:") else False
        self._places = asyncio.Semaphore(max_open)
        self._idle: list[httpx.AsyncClient] = []

    async def ask(self, method: str, path: str, body: dict | None, headers: dict) -> httpx.Response:
        async with self._places:
            connection = self._idle.pop() if self._idle else self._new()
            try:
                return await connection.request(method, path, json=body, headers=headers)
            finally:
                if len(self._idle) < KEPT_IDLE:
                    self._idle.append(connection)
                else:
                    await connection.aclose()

    def _new(self) -> httpx.AsyncClient:
        one = httpx.Limits(max_connections=1)
        sockets = self._transport or httpx.AsyncHTTPTransport(self._tls, limits=one, socket_options=_probed())
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        return httpx.AsyncClient(base_url=self._url, headers=self._headers, transport=sockets, timeout=timeout)

    async def close(self) -> None:
        for connection in self._idle:
            await connection.aclose()


def _probed() -> list[tuple[int, int, int]]:
    """Socket options by which the kernel finds that a peer has gone without a word. Names as far as this system has
    them."""
    options = {"TCP_KEEPIDLE": SILENT_S, "TCP_KEEPINTVL": SILENT_S, "TCP_KEEPCNT": PROBES}
    known = [(getattr(socket, name, None), value) for name, value in options.items()]
    found = [(socket.IPPROTO_TCP, option, value) for option, value in known if option is not None]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *found]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _close(loop: asyncio.AbstractEventLoop, pool: Pool, thread: threading.Thread) -> None:
    async def end() -> None:
        open_calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in open_calls:
            call.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)
        await pool.close()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if thread is not threading.current_thread():  # the garbage collector runs on any
        thread.join()
