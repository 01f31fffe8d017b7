"""Connections to one gateway, shared by calls from any thread and any event loop.

They run on an event loop of a separate thread, so a caller may use an event loop for each call, or block one. A process
that was forked, or that got them by a pickle, makes its own. Called by `app.http.client`.
"""

import asyncio
import os
import socket
import ssl
import threading
import weakref

import httpx

CONNECT_S = 10.0
"""Maximum seconds to wait for a connection. An answer may take as long as a sample."""

KEPT_IDLE = 64
"""Maximum number of connections that wait for the next request. Each costs the gateway a file descriptor."""

SAMPLED = ("/v1/completions", "/v1/chat/completions")
"""Paths of requests for samples."""

OTHERS = 64
"""Maximum number of open requests for anything else. They take no place of samples, which may be waiting for them, as
for an update of the weights that ends a sleep.
"""

SILENT_S, PROBES = 30, 4
"""Seconds of silence after which a peer is probed, and number of probes, as far apart, after which it is given up."""


class Connections:
    """`url`: the gateway's address. `token`: bearer token, or None. `max_open`: maximum number of open requests for
    samples; others wait here. `transport`: httpx's, in place of sockets. `close()` ends all of them; so does the
    garbage collector.
    """

    def __init__(self, url: str, token: str | None, max_open: int, transport: httpx.AsyncBaseTransport | None = None):
        self._given = url, token, max_open, transport
        self._lock, self._made, self._is_closed = threading.Lock(), None, False
        self._running()
        LIVING.add(self)

    def __reduce__(self):
        return type(self), self._given

    def close(self) -> None:
        """Ends all connections, and the requests on them."""
        with self._lock:
            self._is_closed = True
            if self._made is not None:
                self._made.end()

    def after_fork(self) -> None:
        """Drops the parent's connections, whose thread does not exist here; its sockets stay as they are."""
        if self._made is not None:
            self._made.end.detach()
            OF_PARENTS.append(self._made)
        self._lock, self._made = threading.Lock(), None

    def _running(self) -> "Running":
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the client is closed; make another")
            if self._made is None:
                self._made = Running(*self._given)
                self._made.end = weakref.finalize(self, _close, self._made)
            return self._made

    async def ask(self, method: str, path: str, body: dict | None, headers: dict) -> httpx.Response:
        """Returns the answer, of any status. Raises httpx.TransportError. Cancelling the call closes its connection."""
        made = self._running()
        asked = made.pool.ask(method, path, body, headers)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, made.loop))


LIVING: "weakref.WeakSet[Connections]" = weakref.WeakSet()
"""Connections of this process."""

OF_PARENTS: list["Running"] = []
"""Connections of the process that this one was forked from: never collected, since that would close shared sockets."""


def _forget_parents() -> None:
    for one in list(LIVING):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


class Running:
    """Connections on a thread of this process. `end`: closes them, once."""

    end: weakref.finalize

    def __init__(self, url: str, token: str | None, max_open: int, transport: httpx.AsyncBaseTransport | None):
        self.pool = Pool(url, token, max_open, transport)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_run, args=(self.loop,), daemon=True, name="http")
        self.thread.start()


class Pool:
    """The connections themselves, each a client of httpx: httpx's own pool takes time in proportion to all connections
    and waiting requests, at each request (httpcore 1.0: 22 ms with 64 connections and 1,500 requests).
    """

    def __init__(self, url: str, token: str | None, max_open: int, transport: httpx.AsyncBaseTransport | None):
        self._url, self._transport = url, transport
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._tls = ssl.create_default_context() if url.startswith("https:") else False
        self._places, self._others = asyncio.Semaphore(max_open), asyncio.Semaphore(OTHERS)
        self._idle: list[httpx.AsyncClient] = []

    async def ask(self, method: str, path: str, body: dict | None, headers: dict) -> httpx.Response:
        async with self._places if path in SAMPLED else self._others:
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
    """Returns socket options by which the kernel detects a peer that has gone silently. Names as far as this system has
    them.
    """
    options = {"TCP_KEEPIDLE": SILENT_S, "TCP_KEEPINTVL": SILENT_S, "TCP_KEEPCNT": PROBES}
    known = [(getattr(socket, name, None), value) for name, value in options.items()]
    found = [(socket.IPPROTO_TCP, option, value) for option, value in known if option is not None]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *found]


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _close(made: Running) -> None:
    async def end() -> None:
        open_calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in open_calls:
            call.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)
        await made.pool.close()
        made.loop.stop()

    asyncio.run_coroutine_threadsafe(end(), made.loop)
    if made.thread is not threading.current_thread():  # the garbage collector runs on any
        made.thread.join()
