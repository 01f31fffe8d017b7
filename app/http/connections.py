"""Connections to one gateway, shared by calls from any thread and any event loop.

They belong to an event loop on a thread of its own, so a caller may use an event loop for each call, or block one.
Called by `app.http.client`.
"""

import asyncio
import socket
import threading
import weakref

import httpx

CONNECT_S = 10.0
"""Longest wait for a connection. An answer may take as long as a sample."""

KEPT_IDLE = 64
"""Connections that wait for the next request. Each costs the gateway a file descriptor."""

SILENT_S, PROBES = 30, 4
"""Seconds of silence after which a peer is probed, and probes, as far apart, after which it is given up."""


def _alive() -> list[tuple[int, int, int]]:
    """Socket options by which the kernel finds that a peer has gone without a word. Names as far as this system has
    them."""
    options = {"TCP_KEEPIDLE": SILENT_S, "TCP_KEEPINTVL": SILENT_S, "TCP_KEEPCNT": PROBES}
    known = [(getattr(socket, name, None), value) for name, value in options.items()]
    found = [(socket.IPPROTO_TCP, option, value) for option, value in known if option is not None]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *found]


class Connections:
    """`url`: of the gateway. `token`: for its door, or None. `max_open`: requests at once; others wait here.
    `transport`: httpx's, in place of sockets. `close()` ends all of them; so does the garbage collector.
    """

    def __init__(self, url: str, token: str | None, max_open: int, transport: httpx.AsyncBaseTransport | None = None):
        limits = httpx.Limits(max_connections=max_open, max_keepalive_connections=min(max_open, KEPT_IDLE))
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            transport=transport or httpx.AsyncHTTPTransport(limits=limits, socket_options=_alive()),
            timeout=httpx.Timeout(None, connect=CONNECT_S),
        )
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(self._loop,), daemon=True, name="http")
        thread.start()
        self.close = weakref.finalize(self, _close, self._loop, self._http, thread)

    async def ask(self, method: str, path: str, body: dict | None, headers: dict) -> httpx.Response:
        """The answer, of any status. Raises httpx.TransportError. A call that is cancelled closes its connection."""
        if not self.close.alive:
            raise RuntimeError("the client is closed; make another")
        asked = self._http.request(method, path, json=body, headers=headers)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _close(loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient, thread: threading.Thread) -> None:
    async def end() -> None:
        open_calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in open_calls:
            call.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)
        await http.aclose()
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if thread is not threading.current_thread():  # the garbage collector runs on any
        thread.join()
