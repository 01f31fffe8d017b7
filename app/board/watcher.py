"""Looks at a service again and again, and gives each look to all viewers of the board.

Invariant: nothing grows: the last minutes of curves and news are kept; a viewer that reads slowly misses looks, and
none waits for another. A service that is away is one look that says so. Called by `app.board.routes`.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from tailrace.app.board.looks import line, look_of, news
from tailrace.app.calls.client import RolloutClient
from tailrace.app.watch.look import look
from tailrace.app.watch.rates import Rates
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.status import ServiceStatus

KEPT_S = 900.0
"""Of the curves."""

KEPT_LINES = 200
AWAY_S = 4.0
"""A look that takes longer is shown as a service that is away; the question stays open."""

LONGEST = 200
"""Samples of a look: every one of a small service, the tail of a large one."""


class Watcher:
    """`every_s`: seconds between two looks. `run` is to be started once, as a task."""

    def __init__(self, client: RolloutClient, every_s: float):
        self._client, self._every_s = client, every_s
        self._rates = Rates()
        self._moments: deque[dict] = deque(maxlen=max(1, round(KEPT_S / every_s)))
        self._lines: deque[dict] = deque(maxlen=KEPT_LINES)
        self._before: ServiceStatus | None = None
        self._look: dict[str, Any] = {"away": True}
        self._next = asyncio.Event()  # set once there is a newer look

    async def run(self) -> None:
        while True:
            began_s = time.monotonic()
            asking = asyncio.ensure_future(look(self._client, LONGEST))
            done, _ = await asyncio.wait({asking}, timeout=AWAY_S)
            if not done:
                self._publish({"away": True})
            try:
                self._see(*await asking)
            except Exception as error:  # noqa: BLE001 - of one look, mostly a service that is lost: the next may succeed
                self._lines.append(line(f"a look failed: {one_line(error)}"))
                self._publish({"away": True})
            await asyncio.sleep(max(0.0, self._every_s - (time.monotonic() - began_s)))

    def _see(self, status: ServiceStatus, longest) -> None:
        self._rates.add(time.monotonic(), status)
        seen = look_of(time.time(), status, self._rates, longest)
        self._moments.append(seen["moment"])
        self._lines += map(line, news(self._before, status))
        self._before = status
        self._publish(seen)

    def _publish(self, look: dict[str, Any]) -> None:
        self._look, told = look, self._next
        self._next = asyncio.Event()
        told.set()

    async def looks(self) -> AsyncIterator[dict[str, Any]]:
        """First the curves of the last minutes with the present look, then each new look, for ever."""
        newer = self._next
        yield self._look | {"moments": list(self._moments), "news": list(self._lines)}
        while True:
            await newer.wait()
            newer = self._next
            yield self._look | {"news": list(self._lines)}
