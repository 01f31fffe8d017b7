"""A gateway's connection to the coordinator: frequent calls go over a line, the others over Ray, which costs more.

Invariant: a line that the coordinator has lost raises ConnectionError, as a lost coordinator does; the next call opens
another one. Used on one event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from tailrace.app.calls.connection import Connection
from tailrace.deployments.channel.call_frames import CALLS
from tailrace.deployments.channel.call_line import CallLine
from tailrace.deployments.channel.sockets import DialledSocket
from tailrace.deployments.messages.roles import Role

ASK_S = 10.0
"""Maximum seconds for Ray's word on a silent line; a coordinator that hangs for longer is replaced by Serve."""


class LineConnection(Connection):
    """See the module docstring."""

    def __init__(self, handle, role: Role, resume_s: float):
        super().__init__(handle, role, resume_s)
        self._line: CallLine | None = None
        self._opening = asyncio.Lock()

    def send(self, method: str, *arguments):
        """Starts a call once, as `Connection.send`."""
        if method not in CALLS:
            return super().send(method, *arguments)
        return asyncio.ensure_future(self._ask_over_line(method, arguments))

    async def _ask_over_line(self, method: str, arguments: tuple):
        return await (await self._opened()).ask(method, arguments)

    @asynccontextmanager
    async def stream(self, method: str, *arguments) -> AsyncIterator[AsyncIterator]:
        """Opens a stream, as `Connection.stream`."""
        line = await self._opened() if method in CALLS else None
        async with aclosing(line.stream(method, arguments)) if line else super().stream(method, *arguments) as items:
            yield items

    async def _opened(self) -> CallLine:
        async with self._opening:
            if self._line is None or not self._line.is_open:
                address, session = await super().send("open_line", "")
                self._line = CallLine(
                    self.role, lambda take: DialledSocket(address, session, take), lambda: self._has(session)
                )
        return self._line

    async def _has(self, session: str) -> bool:
        """Returns whether the coordinator has a line of this session; True while Ray does not say."""
        try:
            _, known = await asyncio.wait_for(super().send("open_line", session), ASK_S)
        except TimeoutError:
            return True
        except Exception:  # noqa: BLE001 - its calls are made again, over another line
            return False
        return known == session
