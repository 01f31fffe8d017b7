"""The coordinator's side of the pool: a cache, never a dependency, and bounded over weeks of replicas."""

import asyncio
from types import SimpleNamespace

import pytest

from tailrace.deployments.coordinator.kv_pool_manager import MAX_GONE, KvPoolManager
from tailrace.kvpool.status import PoolDown, PoolStatus, StoreNodeStatus
from tailrace.policies.protocol.events import KvLost


def report(name: str, hits: int) -> SimpleNamespace:
    return SimpleNamespace(
        replica_id=name, pool_problem="", key_prefixes=("tailrace-0",), token_bytes=2, block_tokens=16,
        kv_counts={"pool_tokens": hits},
    )  # fmt: skip


def test_counts_of_replicas_that_are_gone_add_up_in_little_room():
    manager = KvPoolManager(None)
    for number in range(500):
        manager.learn([report(f"r{number}", 1), report("stays", number)])
    assert manager.view().counts["pool_tokens"] == 500 + 499
    assert len(manager._engine_counts) <= MAX_GONE + 2


class Failing:
    """A master all of whose calls end in one error."""

    def __init__(self, error: BaseException):
        self._error = error

    def __getattr__(self, name: str):
        async def call(*arguments):
            raise self._error

        return SimpleNamespace(remote=call)


@pytest.mark.parametrize("error", [PoolDown("away"), ZeroDivisionError("a defect"), asyncio.CancelledError("Serve's")])
def test_whatever_goes_wrong_in_the_pool_is_a_count(error):
    async def polled():
        manager = KvPoolManager(Failing(error))
        manager.retire(3)
        working = asyncio.ensure_future(manager.work())
        await asyncio.sleep(0.01)
        events = await manager.poll(0.0)
        assert not working.done()
        working.cancel()
        return manager.view(), events

    view, events = asyncio.run(polled())
    assert events == [] and view.counts["retire_failed"] == 1
    assert view.problem.startswith(type(error).__name__)


class Answering:
    """A master whose status names stores, each with its process and whether it leaves."""

    def __init__(self):
        self.stores: dict[str, tuple[int, bool]] = {}

    def __getattr__(self, name: str):
        async def call(*arguments):
            figures = dict.fromkeys(("keys", "dram_bytes", "ssd_bytes", "ssd_capacity_bytes", "evicted_keys"), 0)
            nodes = [
                StoreNodeStatus(node_id=node, host="h", segment=node, pid=pid, restarts=0, ssd="off", leaving=leaving)
                for node, (pid, leaving) in self.stores.items()
            ]
            return PoolStatus(
                master_address="m:1", pages_address="m:2", master_pid=1, master_restarts=0, dram_capacity_bytes=64,
                segment_bytes={}, put_failures=0, get_failures=0, store_nodes=tuple(nodes), **figures,
            )  # fmt: skip

        return SimpleNamespace(remote=call)


def test_a_store_that_left_and_came_back_has_lost_nothing_and_one_that_died_has():
    async def losses() -> list[int]:
        master = Answering()
        manager, seen = KvPoolManager(master), []
        manager.learn([report("r", 0)])
        for stores in (
            {"a": (10, False), "b": (20, False)},
            {"a": (10, True), "b": (20, False)},
            {"b": (20, False)},
            {"a": (11, False), "b": (20, False)},
            {"a": (12, False), "b": (20, False)},
        ):
            master.stores = stores
            seen.append(sum(isinstance(event, KvLost) for event in await manager.poll(0.0)))
        return seen

    assert asyncio.run(losses()) == [0, 0, 0, 0, 1]
