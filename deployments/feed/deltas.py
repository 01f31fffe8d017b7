"""A state of named rows in sections, and its numbered changes, for any number of followers.

Invariant: the whole state with all later deltas is the present state. A follower gets the whole state first. A follower
that reads slowly, or was away, and has missed more deltas than are kept, gets the whole state again. Nothing is kept
per follower. Used by the coordinator's `Feed`, and by the board, which passes its own to browsers.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

Sections = dict[str, dict[str, Any]]
"""Rows by section and name; in a delta, None marks a removed row."""

KEPT = 32
"""Number of deltas that are kept; at two a second a follower may be 16 s late."""


def fold(state: Sections, changes: Sections) -> None:
    """Applies a delta to a state."""
    for section, rows in changes.items():
        known = state.setdefault(section, {})
        for name, row in rows.items():
            if row is None:
                known.pop(name, None)
            else:
                known[name] = row


def change(known: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns the rows of a section that differ from the known ones, and None for each removed row."""
    found = {name: row for name, row in now.items() if known.get(name) != row}
    found.update((name, None) for name in known.keys() - now.keys())
    return found


class Deltas:
    """`epoch`: unique among such objects, so that the numbers of two are not mixed up."""

    def __init__(self, epoch: str):
        self.epoch, self.number, self.at_s = epoch, 0, 0.0
        self.state: Sections = {}
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._next = asyncio.Event()

    def put(self, at_s: float, changes: Sections) -> None:
        """Applies the next delta, and wakes the followers. `at_s`: unix seconds. Empty sections are left out."""
        changes = {section: rows for section, rows in changes.items() if rows}
        fold(self.state, changes)
        self.number, self.at_s = self.number + 1, at_s
        self._kept.append(self._encoded(False, changes))
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    def _encoded(self, whole: bool, sections: Sections) -> bytes:
        about = {"epoch": self.epoch, "number": self.number, "whole": whole, "at_s": round(self.at_s, 3)}
        return json.dumps(about | {"sections": sections}).encode()

    async def follow(self, epoch: str = "", number: int = 0) -> AsyncIterator[bytes]:
        """Yields the whole state, then each delta, as JSON. Never ends. `epoch`, `number`: those of the last delta that
        the follower has, if any; it then gets only later deltas, as far as they are kept.
        """
        if epoch != self.epoch:
            number = -1
        while True:
            if number == self.number:
                await self._next.wait()
            elif 0 <= number < self.number and self.number - number <= len(self._kept):
                found = self._kept[len(self._kept) - (self.number - number)]
                number += 1
                yield found
            else:
                number = self.number
                yield self._encoded(True, self.state)
