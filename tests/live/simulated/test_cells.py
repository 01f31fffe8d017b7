"""Two cells over one fleet, on the virtual clock: replicas are lent and come back, and tokens are those of one cell."""

import asyncio
from pathlib import Path

import pytest
from virtual_cluster import play

from tailrace.app.calls.cells import CellClients
from tailrace.app.calls.client import RolloutClient
from tailrace.deployments.cells.lender import Lender
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.lab.fuzz.drivers import TaskHeartbeat
from tailrace.lab.fuzz.handles import IngressHandle
from tailrace.lab.fuzz.virtual_time import Process
from tailrace.policies.models.lending import cell_of

CELLS = ("first", "second")
PLAIN = {"chunking": {"type": "fixed", "chunk_tokens": 32}}


class CoordinatorCell:
    """A simulated coordinator as a cell, from the start without replicas."""

    def __init__(self, name: str, process: Process, coordinator):
        self.name, self.process, self.coordinator = name, process, coordinator
        self.engines = coordinator.rollouts._engines
        self.engines.own(frozenset())

    def client(self) -> RolloutClient:
        async def present():
            return self.process, self.coordinator

        return RolloutClient(handle=IngressHandle(present), heartbeat=TaskHeartbeat)

    async def cell_view(self):
        return self.coordinator.rollouts.cell_view(self.name)

    async def own(self, replicas: frozenset[str]) -> None:
        self.process.run(self.engines.own, replicas)


def batch(batch_id: str, cell: str, groups: int) -> RolloutBatch:
    """Of groups whose samples belong to one cell alone, and of one group of the other."""
    names = [f"p{n}" for n in range(400)]
    ours = [name for name in names if cell_of(name, CELLS) == cell][:groups]
    other = next(name for name in names if cell_of(name, CELLS) != cell)
    chosen = [*ours, other]
    return RolloutBatch(
        batch_id=batch_id,
        groups=tuple(PromptGroup(prompt_id=name, token_ids=(1, 2, 3), samples=4, max_tokens=300) for name in chosen),
    )


async def tokens(client, message: RolloutBatch) -> dict:
    return {group.prompt_id: [sample.token_ids for sample in group.samples] async for group in client.rollout(message)}


BATCHES = [batch("one", "first", 24), batch("two", "second", 24)]


def in_one_cell(folder: Path) -> list[dict]:
    found = []

    async def story(cluster, client):
        found.extend([await tokens(client, message) for message in BATCHES])

    play(story, folder, replicas=6, policies=PLAIN)
    return found


@pytest.mark.parametrize("killed", [False, True])
def test_replicas_are_lent_and_return_and_the_tokens_are_the_same(tmp_path, killed):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected, lends = in_one_cell(tmp_path / "one"), []

    async def story(cluster, client):
        process = Process("second cell")
        other = await cluster.start_one(process)
        cells = [
            CoordinatorCell("first", cluster.coordinator_process, cluster.coordinator),
            CoordinatorCell("second", process, other),
        ]
        lender = Lender({cell.name: cell for cell in cells}, lambda: list(cluster.replicas))

        async def lending() -> None:
            while True:
                await lender.look()
                lends.extend((one.giver, one.taker, one.reason.split()[-1]) for one in lender.moves)
                owned = [replica for cell in cells for replica in cell.engines.owned]
                assert len(owned) == len(set(owned)), "a replica has one cell"
                await asyncio.sleep(1.0)

        task = asyncio.ensure_future(lending())
        clients = CellClients({cell.name: cell.client() for cell in cells})
        for message, wanted in zip(BATCHES, expected, strict=True):
            rolling = asyncio.ensure_future(tokens(clients, message))
            if killed:
                await asyncio.sleep(15.0)
                lent = next(iter(cells[0].engines.owned | cells[1].engines.owned))
                cluster.kill(lent)
            assert await rolling == wanted
        await asyncio.sleep(30.0)
        assert not task.done()
        assert {cell.name: cell.engines.owned for cell in cells} == {
            name: {one for one in cluster.replicas if cell_of(one, CELLS) == name} for name in CELLS
        }
        task.cancel()
        for cell in cells:
            assert not any(cell.coordinator.rollouts.books().values())
        process.kill()

    play(story, tmp_path / "two", replicas=6, policies=PLAIN)
    directions = {(giver, taker) for giver, taker, _ in lends}
    assert directions == {("first", "second"), ("second", "first")}
    assert {"there", "returns"} <= {reason for *_, reason in lends}


def test_an_error_of_one_cell_ends_the_stream_and_the_other_cell_s_part():
    class Fails:
        async def rollout(self, batch):
            raise ValueError("refused")
            yield

    class Endless:
        closed = False

        async def rollout(self, batch):
            try:
                await asyncio.Event().wait()
                yield
            finally:
                self.closed = True

    async def whole() -> None:
        other = Endless()
        clients = CellClients({"first": Fails(), "second": other})
        with pytest.raises(ValueError, match="refused"):
            await tokens(clients, BATCHES[0])
        assert other.closed

    asyncio.run(whole())
