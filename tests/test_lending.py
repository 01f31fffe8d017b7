"""Replicas are lent to cells whose samples wait, and go home; no replica has two cells."""

import asyncio
from collections import Counter
from random import Random

import pytest

from tailrace.deployments.cells.lender import Lender
from tailrace.policies.models.lending import CellView, cell_of, lend

CELLS = ("a", "b", "c")


def view(name: str, waiting: int, replicas: str, idle: str = "") -> CellView:
    return CellView(name, waiting, tuple(replicas.split()), tuple(idle.split()))


def moves(cells, **home):
    return [(one.replica_id, one.giver, one.taker) for one in lend(cells, home)]


def test_a_cell_whose_samples_wait_takes_an_idle_replica_of_one_without():
    cells = [view("a", 5, "r1"), view("b", 0, "r2 r3", "r2 r3"), view("c", 2, "r4", "r4")]
    assert moves(cells, r1="a", r2="b", r3="b", r4="c") == [("r2", "b", "a"), ("r3", "b", "c")]


def test_a_lent_replica_returns_when_it_is_idle_and_first_to_its_home():
    cells = [view("a", 0, "r1 r2", "r1 r2"), view("b", 3, "r3")]
    assert moves(cells, r1="a", r2="b", r3="b") == [("r2", "a", "b")]
    cells = [view("a", 0, "r1 r2", "r2"), view("b", 0, "r3")]
    assert moves(cells, r1="a", r2="b", r3="b") == [("r2", "a", "b")]


@pytest.mark.parametrize("waiting", [(0, 0), (4, 4), (4, 0)])
def test_nothing_moves_without_idle_replicas_or_use_for_them(waiting):
    assert moves([view("a", waiting[0], "r1"), view("b", waiting[1], "r2")], r1="a", r2="b") == []
    assert moves([view("a", 4, "r1", "r1"), view("b", 4, "r2", "r2")], r1="a", r2="b") == []


def test_a_new_cell_takes_its_share_of_names_and_moves_no_other():
    names = [f"prompt-{n}" for n in range(3_000)]
    before, after = ([cell_of(name, cells) for name in names] for cells in (CELLS[:2], CELLS))
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"c"}
    assert all(800 < count < 1200 for count in Counter(after).values())


class BookCell:
    """A cell that has work and replicas by a book."""

    def __init__(self, name: str):
        self.name, self.waiting, self.owned, self.busy, self.away = name, 0, frozenset(), set(), False

    async def cell_view(self) -> CellView:
        if self.away:
            raise ConnectionError("away")
        idle = tuple(sorted(self.owned - self.busy))
        return CellView(self.name, self.waiting, tuple(sorted(self.owned)), idle)

    async def own(self, replicas: frozenset[str]) -> None:
        self.owned = replicas


@pytest.mark.parametrize("seed", range(30))
def test_every_replica_has_one_cell_over_any_history_and_is_used_where_samples_wait(seed):
    rng, cells = Random(seed), {name: BookCell(name) for name in CELLS}
    running = {f"r{n}" for n in range(8)}
    lender = Lender(cells, lambda: running)

    async def history() -> None:
        for _ in range(60):
            for cell in cells.values():
                cell.waiting = rng.choice((0, 0, 3))
                cell.away = rng.random() < 0.1
                cell.busy = {one for one in cell.owned if rng.random() < 0.3 or cell.waiting}
            if rng.random() < 0.2:
                running.symmetric_difference_update({f"r{rng.randrange(8)}"})
            await lender.look()
            owners = Counter(replica for cell in cells.values() for replica in cell.owned & running)
            assert set(owners.values()) <= {1}
        for cell in cells.values():
            cell.waiting, cell.busy, cell.away = 0, set(), False
        for _ in range(3):
            await lender.look()
        assert {one: cell.name for cell in cells.values() for one in cell.owned} == {
            one: cell_of(one, CELLS) for one in running
        }

    asyncio.run(history())
