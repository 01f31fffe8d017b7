"""What `bench weights` and `bench ranks` make of updates that change nothing or are refused, of a replica that never
comes, and of a load that ends.
"""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

from tailrace.app.errors import Failed
from tailrace.lab.benchmarks.live import weights
from tailrace.lab.benchmarks.live.decoding_load import DecodingLoad
from tailrace.lab.benchmarks.live.ranks import RanksBench


class UpdatesByHand:
    """Updates of a service whose tokens are those of the set of weights that was loaded last. `loads`: whether updates
    load anything.
    """

    def __init__(self, loads: bool):
        self.tensors, self.client, self.version = [{"w": np.ones(2)}] * 2, AsyncMock(), 0
        self._loads, self._which = loads, 0

    async def by_folder(self, which: int) -> dict:
        self._which = which if self._loads else 0
        return {"total_s": 1.0, "trainer_blocked_s": 0.5, "engine_paused_s": [0.1]}

    by_memory = by_folder

    async def busy(self) -> None:
        """Both replicas always run samples."""

    async def probe(self) -> list[tuple[int, ...]]:
        return [(self._which,)]


@pytest.mark.parametrize("loads", [True, False])
def test_updates_that_load_nothing_do_not_give_the_same_tokens(monkeypatch, loads):
    for name in ("_late", "_killed"):
        monkeypatch.setattr(weights, name, AsyncMock(return_value={}))
    for repeats in (1, 2):
        found = asyncio.run(weights._measured(UpdatesByHand(loads), repeats, lambda _: None))
        assert found["same_tokens"] is loads and found["bytes"] == 16


def test_a_replica_that_never_joins_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(weights, "DEPLOY_S", 0.1)
    monkeypatch.setattr(weights, "kill_actors", lambda _: 1)
    updates = UpdatesByHand(True)
    updates.client.status.return_value = SimpleNamespace(replicas=[SimpleNamespace(replica_id="a", ready=True)])

    async def late():
        async with asyncio.timeout(10):
            await weights._late(updates, {}, lambda _: None)

    with pytest.raises(Failed, match="no replica has joined"):
        asyncio.run(late())


class Refusing:
    """A client whose service refuses every batch."""

    async def rollout(self, _batch):
        raise ValueError("refused")
        yield


class Rolling:
    """A client whose batches never end."""

    async def rollout(self, _batch):
        await asyncio.sleep(3600)
        yield


def test_a_load_that_ends_is_the_error_of_what_runs_beside_it():
    async def beside(client, work):
        async with asyncio.timeout(20):
            return await DecodingLoad(client, 2).beside(work)

    async def done() -> dict:
        return {"well": 1}

    assert asyncio.run(beside(Rolling(), done())) == {"well": 1}
    with pytest.raises(ValueError, match="refused"):
        asyncio.run(beside(Refusing(), asyncio.sleep(3600)))


@pytest.mark.parametrize("refused", [True, False])
def test_a_version_that_is_refused_says_why(refused):
    row = {"update_s": 1.0} | ({"refused": "it holds NaN"} if refused else {"paused_s": [0.1], "blocked_s": 0.5})
    ranks = nullcontext()
    ranks.publish = lambda: [dict(row)]
    bench = RanksBench(layouts=(), repeats=1, samples=2, link_mbit=None, link_ms=0.0, say=lambda _: None)
    work = bench._updates(AsyncMock(), ranks, (1,), SimpleNamespace(carried=7))
    if not refused:
        assert asyncio.run(work) == [[row | {"carried": 0}]]
        return
    with pytest.raises(Failed, match="version 1 was refused: it holds NaN"):
        asyncio.run(work)
