"""A state of named rows in sections, and the numbered changes of it, for any number of followers.

Invariant: the whole state with all later deltas is the present state. A follower gets the whole state first; one that
reads slowly, or was away, and has missed more deltas than are kept, gets the whole state again. Nothing is kept per
follower. Used by the coordinator's `Feed`, and by the board, which hands its own to browsers.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

Sections = dict[str, dict[str, Any]]
"""Rows by section and name; in a delta None takes the place of a row that is gone."""

KEPT = 32
"""Deltas; at two a second a follower may be 16 s late."""


def fold(state: Sections, changes: Sections) -> None:
    """Change a state by a delta."""
    for section, rows in changes.items():
        known = state.setdefault(section, {})
        for name, row in rows.items():
            if row is None:
                known.pop(name, None)
            else:
                known[name] = row


def change(known: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The rows of a section that differ from those known, and None for each that is gone."""
    found = {name: row for name, row in now.items() if known.get(name) != row}
    found.update((name, None) for name in known.keys() - now.keys())
    return found


class Deltas:
    """`epoch`: no other object has or has had it, so that the numbers of two are not mixed up."""

    def __init__(self, epoch: str):
        self.epoch, self.number, self.at_s = epoch, 0, 0.0
        self.state: Sections = {}
        self._kept: deque[bytes] = deque(maxlen=KEPT)
        self._next = asyncio.Event()

    def put(self, at_s: float, changes: Sections) -> None:
        """Fold the next delta, and wake the followers. `at_s`: unix seconds. Empty sections are left out."""
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
        """The whole state, then each delta, as JSON, for ever. `epoch`, `number`: of the last delta that the follower
        has, if it has any: it then gets those after it alone, as far as they are kept."""
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
