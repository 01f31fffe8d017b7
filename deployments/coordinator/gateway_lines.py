"""The coordinator's calls for lines from gateways, which carry the frequent calls of these, see `call_frames.CALLS`.

Invariant: a coordinator that ends answers first what has arrived over lines. Base class of `Coordinator`.
"""

import asyncio
from collections.abc import Callable

from tailrace.deployments.channel.call_lines import CallLines
from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.sockets import CoordinatorSocket
from tailrace.deployments.messages.roles import Role, admits


class GatewayLines:
    """`_listen`: opens a socket; `_loops`: the coordinator's, whose end is its end. Both belong to the coordinator."""

    _listen: Callable[[Callable[[str, bytes], None]], CoordinatorSocket]
    _loops: list[asyncio.Task]
    _call_lines: CallLines | None = None

    @admits(Role.OBSERVER)
    async def open_line(self, session: str) -> tuple[Address, str]:
        """Returns address and session of a gateway's line: of `session` if it is open, else of a new one."""
        if self._call_lines is None:
            self._call_lines = CallLines(self, self._listen)
            self._loops.append(asyncio.get_running_loop().create_task(self._call_lines.run()))
        return self._call_lines.open(session)

    def __del__(self):
        """Returns what waits for the calls over lines: Serve awaits it before a replica ends."""
        return None if self._call_lines is None else self._call_lines.close()
