"""Which replicas change cells. A cell is a coordinator with a core of its own; a group of samples stays in its cell.

Room is never shared, only lent: a replica has one cell at a time, and moves while no chunk runs there. Each replica has
a home, to which it returns once its taker has no use for it. Pure; called by `deployments.cells.lender`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class CellView:
    """`waiting`: samples without room. `idle`: those of its `replicas` that no chunk runs on."""

    name: str
    waiting: int
    replicas: tuple[str, ...]
    idle: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lend:
    """A replica leaves `giver` for `taker`."""

    replica_id: str
    giver: str
    taker: str
    reason: str


def cell_of(name: str, cells: Sequence[str]) -> str:
    """The cell of a group, or the home of a replica, by its name: rendezvous hashing (Thaler, Ravishankar 1998).

    A change of the cells moves only the names that must move.
    """
    return max(
        cells, key=lambda cell: blake2b(f"{cell}\0{name}".encode(), digest_size=8, person=b"tailrace-cell").digest()
    )


def lend(cells: Sequence[CellView], home: Mapping[str, str]) -> tuple[Lend, ...]:
    """The moves that are due, at most one for each replica and taker.

    A cell whose samples wait takes an idle replica of a cell without waiting ones: first one of its own that was lent,
    then of the cell with the highest number of idle ones. A lent replica that is idle where no sample waits goes home.
    """
    rich = {cell.name: sorted(cell.idle) for cell in cells if not cell.waiting}
    moves = []
    for taker in sorted(cells, key=lambda cell: (-cell.waiting / max(1, len(cell.replicas)), cell.name)):
        if taker.waiting and (found := _found(taker.name, rich, home)) is not None:
            giver, replica_id = found
            rich[giver].remove(replica_id)
            moves.append(Lend(replica_id, giver, taker.name, f"{taker.waiting} samples wait there"))
    for giver, idle in rich.items():
        for replica_id in idle:
            if home[replica_id] != giver:
                moves.append(Lend(replica_id, giver, home[replica_id], "it returns"))
    return tuple(moves)


def _found(taker: str, rich: Mapping[str, list[str]], home: Mapping[str, str]) -> tuple[str, str] | None:
    """Giver and replica."""
    offers = [(giver, replica_id) for giver, idle in rich.items() for replica_id in idle]
    return min(offers, key=lambda one: (home[one[1]] != taker, -len(rich[one[0]]), one), default=None)
