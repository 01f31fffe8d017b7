"""Follows a service for any number of browsers, and keeps curves and news of the last minutes.

Invariant: nothing grows: curves and news are bounded, and browsers read from one bounded run of deltas. An unreachable
service is shown by a row; the state before it stays. With no browser for IDLE_S it does not watch, unless `always`.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from secrets import token_hex
from typing import Any

from tailrace.app.board.news import news
from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.feed.deltas import Deltas, change
from tailrace.deployments.messages.errors import is_own_cancel, one_line

KEPT_MOMENTS = 900
"""Maximum number of points of the curves, one a second: 15 minutes."""

KEPT_NEWS = 200
RATE_S = 5.0
"""Seconds over which a rate is computed: a replica reports several times in it."""

AWAY_S = 4.0
"""Seconds without a delta after which the service is shown as unreachable; the watcher keeps waiting."""

AGAIN_S = 1.0
IDLE_S = 900.0


class Watcher:
    """`client`: makes an observer's. `always`: watch without browsers too, so that the first one finds curves."""

    def __init__(self, client: Callable[[], RolloutClient], always: bool = False):
        self._client, self._always = client, always
        self._deltas = Deltas(token_hex(4))
        self._made: deque[tuple[float, int]] = deque()  # tokens of the service, of the last RATE_S
        self._moments: deque[str] = deque()
        self._news: deque[str] = deque()
        self._lines = 0
        self._task: asyncio.Task | None = None
        self.viewers, self._left_s = 0, 0.0

    def begin(self) -> None:
        """Starts watching, unless it does already."""
        if self._task is None:
            self._deltas.put(time.time(), {"board": {"away": "it has not answered yet"}})
            self._task = asyncio.ensure_future(self._run())

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def follow(self, epoch: str = "", number: int = 0) -> AsyncIterator[str]:
        """Yields deltas as JSON, see `Deltas.follow`. A slow reader misses some, and no reader waits for another."""
        self.begin()
        self.viewers += 1
        try:
            async for item in self._deltas.follow(epoch, number):
                yield item.decode()
        finally:
            self.viewers -= 1
            self._left_s = time.monotonic()

    # ---- the service -------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._idle():
            try:
                async with aclosing(self._client().watch()) as items:
                    await self._read(items)
            except (Exception, asyncio.CancelledError) as error:  # mostly a lost service: the call is repeated
                if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                    raise
                self._say_away(one_line(error))
            await asyncio.sleep(AGAIN_S)
        self._task = None

    async def _read(self, items: AsyncIterator[dict]) -> None:
        while not self._idle():
            asking = asyncio.ensure_future(anext(items))
            try:
                done, _ = await asyncio.wait({asking}, timeout=AWAY_S)
                if not done:
                    self._say_away(f"it has said nothing for {AWAY_S:.0f} s")
                self._see(await asking)
            finally:
                asking.cancel()
                await asyncio.wait({asking})  # else the iterator could not be closed

    def _idle(self) -> bool:
        return not (self._always or self.viewers) and time.monotonic() > self._left_s + IDLE_S

    def _say_away(self, why: str) -> None:
        if self._deltas.state.get("board", {}).get("away") != why:
            self._deltas.put(time.time(), {"board": {"away": why}})

    def _see(self, delta: dict[str, Any]) -> None:
        """Takes a delta of the service. If it is a whole state, after a break, only the differences count."""
        state, changes = self._deltas.state, delta["sections"]
        if delta["whole"]:
            known = {name: rows for name, rows in state.items() if name not in ("board", "news", "moments")}
            changes = {name: change(known.get(name, {}), changes.get(name, {})) for name in {**known, **changes}}
        lines = news(state, changes) if "service" in state else []
        changes = changes | {"board": {"away": ""} if state.get("board", {}).get("away") else {}}
        changes["news"] = self._new_lines(delta["at_s"], lines)
        self._deltas.put(delta["at_s"], changes)
        if not self._moments or delta["at_s"] >= float(self._moments[-1]) + 0.9:
            self._deltas.put(delta["at_s"], {"moments": self._new_moment(delta["at_s"])})

    def _new_lines(self, at_s: float, lines: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for text in lines:
            self._lines += 1
            self._news.append(str(self._lines))
            found[str(self._lines)] = {"at_s": at_s, "text": text}
        while len(self._news) > KEPT_NEWS:
            found[self._news.popleft()] = None
        return found

    def _new_moment(self, at_s: float) -> dict[str, Any]:
        state = self._deltas.state
        service, name = state["service"], f"{at_s:.1f}"
        found: dict[str, Any] = {
            name: {
                "running": service["running"],
                "waiting": service["waiting"],
                "replicas": sum(row["state"] == "ready" for row in state.get("replicas", {}).values()),
                "tokens_per_s": self._rate(at_s, service["made"]),
                "tail": any(row["tail"] for row in state.get("batches", {}).values()),
            }
        }
        self._moments.append(name)
        while len(self._moments) > KEPT_MOMENTS:
            found[self._moments.popleft()] = None
        return found

    def _rate(self, at_s: float, made: int) -> float | None:
        """Returns tokens per second; None before the second reading of a coordinator."""
        if self._made and made < self._made[-1][1]:  # another coordinator counts from 0
            self._made.clear()
        self._made.append((at_s, made))
        while len(self._made) > 2 and at_s - self._made[1][0] >= RATE_S:
            self._made.popleft()
        (first_s, first), (last_s, last) = self._made[0], self._made[-1]
        return round((last - first) / (last_s - first_s), 1) if last_s > first_s else None
