"""The gateway's port: uvicorn on the replica's own event loop. Serve's proxy before it would take 5 to 8 ms a request.

Invariant: replicas of the node's user alone share the port (SO_REUSEPORT), also while one replaces another. A replica
that stops takes no more connections, and answers what is open. Called by `build`.
"""

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

KEEP_ALIVE_S = 90
"""Seconds for which an idle connection stays open, as Serve's proxy keeps it."""

STOP_S = 15
"""Maximum seconds for open requests of a replica that stops: below the 20 s after which Serve kills it."""


class GatewayPort:
    """Made by `opened`."""

    def __init__(self, app: FastAPI, host: str, port: int):
        self._socket = _bound(host, port)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([self._socket]))

    @classmethod
    async def opened(cls, app: FastAPI, host: str, port: int) -> "GatewayPort":
        """Returns once the port answers. Raises OSError if it cannot be opened, RuntimeError if the server ends."""
        found = cls(app, host, port)
        while not found._server.started:
            found.check()
            await asyncio.sleep(0.01)
        return found

    def check(self) -> None:
        """Raises RuntimeError if the server has ended."""
        if self._serving.done():
            raise RuntimeError("the gateway's server has ended") from self._serving.exception()

    async def close(self) -> None:
        """Returns once open requests have ended, or after STOP_S."""
        self._server.should_exit = True
        await self._serving


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        found.bind(address)
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"the gateway's {host}:{port}: {error.strerror}") from error
    return found
