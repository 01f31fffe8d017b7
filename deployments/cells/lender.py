"""Gives each engine replica to one cell, and moves idle ones between cells.

Invariant: a replica is taken from its cell before another one has it. The lender holds no state that it could lose:
homes follow from names, and the cells know their replicas. Called once a second.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from tailrace.deployments.messages.errors import one_line
from tailrace.policies.models.lending import CellView, Lend, cell_of, lend

LOOK_S = 1.0


class Cell(Protocol):
    """A coordinator, as the lender needs it."""

    async def cell_view(self) -> CellView: ...

    async def own(self, replicas: frozenset[str]) -> None:
        """The replicas that it may use from now on, those of other cells left out."""


class Lender:
    """`cells`: by name. `running`: gives the names of all running replicas."""

    def __init__(self, cells: Mapping[str, Cell], running: Callable[[], Iterable[str]]):
        self._cells, self._running = cells, running
        self.moves: list[Lend] = []  # of the last look

    async def run(self) -> None:
        """Look once a second, for ever. A cell that does not answer keeps its replicas."""
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - a cell that is away keeps its replicas until the next look
                logging.getLogger(__name__).error("replicas were not lent: %s", one_line(error))
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        names = list(self._cells)
        answers = await asyncio.gather(*(self._cells[n].cell_view() for n in names), return_exceptions=True)
        views = {name: one for name, one in zip(names, answers, strict=True) if isinstance(one, CellView)}
        self.moves = []
        if len(views) < len(names):
            return
        running = set(self._running())
        owned = {name: running.intersection(view.replicas) for name, view in views.items()}
        home = {replica_id: cell_of(replica_id, names) for replica_id in running}
        present = [replace(one, idle=tuple(owned[one.name].intersection(one.idle))) for one in views.values()]
        for replica_id in running.difference(*owned.values()):
            owned[home[replica_id]].add(replica_id)
        self.moves = list(lend(present, home))
        for move in self.moves:
            owned[move.giver].discard(move.replica_id)
        await self._own(owned)
        for move in self.moves:
            owned[move.taker].add(move.replica_id)
        if self.moves:
            await self._own(owned)

    async def _own(self, owned: Mapping[str, set[str]]) -> None:
        await asyncio.gather(*(self._cells[name].own(frozenset(replicas)) for name, replicas in owned.items()))
