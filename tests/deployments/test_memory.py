"""Weeks of service: no book grows with the batches, replicas, drivers or weights versions that have come and gone."""

import asyncio
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from performances import measured

from tailrace.deployments.context import live_groups
from tailrace.deployments.context.live_groups import LiveGroups, Packet
from tailrace.deployments.coordinator import kv_pool_manager
from tailrace.deployments.coordinator.kv_pool_manager import KvPoolManager
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.weights import Weights
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.context import GroupRef, Piece
from tailrace.deployments.telemetry import Telemetry
from tailrace.kvpool.status import PoolStatus
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import AbortChunk, StartChunk

MANY = 3000


def entries(root: object) -> int:
    """Entries of all containers that can be reached from an object of ours."""
    seen, found, todo = set(), 0, [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (str, bytes, type)):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            found += len(one)
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, (list, set, tuple, deque)):
            found += len(one)
            todo += one
        elif type(one).__module__.startswith("tailrace."):
            todo += vars(one).values() if hasattr(one, "__dict__") else ()
            slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += [getattr(one, name) for name in slots if hasattr(one, name)]
    return found


class Weeks:
    """A core that lives through rounds: each has batches, a cancelled one, a failure, other replicas and weights."""

    def __init__(self, **policies):
        self.core, self.now, self.round = RolloutCore(Policies(**policies), limits=Limits(1, 2)), 0.0, 0

    def tick(self) -> list:
        self.now += 1.0
        return list(self.core.decide(ev.Tick(self.now)))

    def submit(self, name: str) -> None:
        groups = tuple(ev.GroupSpec(f"{name}/{number}", 10, 2, 40) for number in range(3))
        self.core.observe(ev.SamplesSubmitted(self.now, name, groups))

    def join(self, name: str) -> None:
        version = self.core.replicas.weights_version
        self.core.observe(ev.ReplicaJoined(self.now, name, 16, 400, 4, 0, version, f"node of {name}"))
        self.core.observe(measured(self.now, name, 1e3, 1e4, 0.0, 0.02, 0.001, self.now))

    def live(self) -> None:
        """One round. It begins and ends without a replica."""
        self.round += 1
        self.core.observe(ev.WeightsChanged(self.now, self.round))
        self.submit(f"early{self.round}")
        self.core.observe(ev.BatchCancelled(self.now, f"early{self.round}"))
        names = [f"r{self.round}.{number}" for number in range(2)]
        for name in names:
            self.join(name)
        self.submit(f"one{self.round}")
        self.submit(f"two{self.round}")
        running: dict[str, StartChunk] = {}
        fails = 1
        for turn in range(100):
            for action in self.tick():
                if isinstance(action, StartChunk):
                    running[action.chunk_id] = action
                elif isinstance(action, AbortChunk):
                    self.end(running.pop(action.chunk_id), ev.ChunkEnd.ABORTED)
            if turn == 1:
                self.core.observe(ev.ReplicaLeft(self.now, names[0], "gone"))
                running = {name: start for name, start in running.items() if start.replica_id != names[0]}
            elif fails and running:
                fails -= 1
                self.core.observe(ev.ChunkFailed(self.now, running.popitem()[0], "failed"))
            elif running:
                self.end(running.popitem()[1], ev.ChunkEnd.LENGTH)
            elif not self.core.knows_batch(f"one{self.round}") and not self.core.knows_batch(f"two{self.round}"):
                break
        else:
            raise AssertionError("the batches of a round do not end")
        self.core.observe(ev.ReplicaLeft(self.now, names[1], "gone"))

    def end(self, start: StartChunk, end: ev.ChunkEnd) -> None:
        tokens = 0 if end is ev.ChunkEnd.ABORTED else start.max_tokens
        event = ev.ChunkFinished(self.now, start.chunk_id, tokens, end, start.weights_version, stored_tokens=tokens)
        self.core.observe(event)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies",
    [
        {},
        {"lanes": "none"},
        {"ordering": "group_static", "placement": "pinned", "chunking": {"type": "fixed", "chunk_tokens": 13}},
        {"ordering": "seer", "placement": "cost_aware", "kv_on_update": "keep", "tail": "release"},
    ],
)
def test_the_core_does_not_grow(policies, monkeypatch):
    monkeypatch.setattr("tailrace.policies.core.length_tracker.KNOWN_PROMPTS", 100)  # whose lengths lanes remember
    weeks = Weeks(**policies)
    for _ in range(40):
        weeks.live()
    weeks.tick()
    early = entries(weeks.core)
    for _ in range(400):
        weeks.live()
    weeks.tick()
    assert entries(weeks.core) <= early + 300, "a heap keeps dead entries, up to a bound"


def test_a_core_without_replicas_does_not_keep_cancelled_batches():
    weeks = Weeks()
    for number in range(MANY):
        weeks.submit(f"b{number}")
        weeks.core.observe(ev.BatchCancelled(weeks.now, f"b{number}"))
        weeks.tick()
    assert entries(weeks.core) < MANY


def report(name: str, version: int = 0, **fields) -> EngineStats:
    known = {"block_tokens": 16, "kv_capacity_blocks": 100, "max_running": 4, "max_model_len": 512, "draft_tokens": 0}
    return EngineStats(replica_id=name, weights_version=version, observed_at=0.0, **known, **fields)


def test_the_registry_forgets_replicas_that_were_lost():
    registry = ReplicaRegistry()
    for number in range(MANY):
        registry.observe([(report(f"r{number}"), float(number))], number + 0.1)
        registry.lose(f"r{number}", number + 0.5)
    assert entries(registry) < 10


def test_the_weights_keep_the_newest_digests():
    book = Weights(None, None)
    for version in range(1, MANY):
        book.observe([report("r", version, weights_digest=f"d{version}")])
    assert len(book.digests) < MANY / 2 and book.digest == f"d{MANY - 1}"
    assert book.may_have_been(MANY - 2, f"d{MANY - 2}") and not book.may_have_been(MANY - 2, "another")


class Hanging:
    """A master that reports its nodes, and never answers anything else."""

    def __init__(self):
        self.round = 0

    def __getattr__(self, name: str):
        return SimpleNamespace(remote=self._status if name == "status" else self._hang)

    async def _status(self):
        self.round += 1
        node = SimpleNamespace(node_id=f"node{self.round}", pid=self.round, leaving=False)
        return PoolStatus.model_construct(
            master_pid=1, store_nodes=(node,), ssd_capacity_bytes=0, dram_capacity_bytes=1, dram_bytes=0
        )

    async def _hang(self, *arguments):
        await asyncio.Event().wait()


async def _manager() -> KvPoolManager:
    manager = KvPoolManager(Hanging())
    manager.learn([SimpleNamespace(
        replica_id="r", pool_problem="", key_prefixes=("tailrace-0",), token_bytes=2, block_tokens=16, kv_counts={}
    )])  # fmt: skip
    return manager


def test_a_pool_that_hangs_does_not_collect_operations(monkeypatch):
    monkeypatch.setattr(kv_pool_manager, "MAX_TODO_KEYS", 100)

    async def play() -> tuple[int, dict]:
        manager = await _manager()
        working = asyncio.ensure_future(manager.work())
        for _ in range(MANY):
            manager._do("release", bytes(4 * kv_pool_manager.NAME_BYTES))
            await asyncio.sleep(0)
        working.cancel()
        return entries(manager._todo), manager.view().counts

    kept, counts = asyncio.run(play())
    assert kept < 400 and counts["release_failed.too_many"] == MANY - 25


def test_operations_that_have_been_done_make_room_again(monkeypatch):
    monkeypatch.setattr(kv_pool_manager, "MAX_TODO_KEYS", 100)

    class Answering(Hanging):
        async def _hang(self, keys: list[str]):
            return len(keys), []

    async def play() -> dict:
        manager = await _manager()
        manager._master = Answering()
        working = asyncio.ensure_future(manager.work())
        for _ in range(200):
            manager._do("release", bytes(4 * kv_pool_manager.NAME_BYTES))
            while manager._todo:
                await asyncio.sleep(0)
        working.cancel()
        return manager.view().counts

    assert asyncio.run(play()) == {"released_keys": 800}


def test_the_pool_s_nodes_are_bounded(monkeypatch):
    monkeypatch.setattr(kv_pool_manager, "MAX_NODES", 8)

    async def play() -> dict:
        manager = await _manager()
        for _ in range(100):
            assert await manager.poll(0.0)
        return manager._processes

    processes = asyncio.run(play())
    assert len(processes) == 8 and "master" in processes and "node100" in processes


def test_traces_that_nobody_takes_are_bounded():
    telemetry = Telemetry("engine")
    for number in range(MANY):
        telemetry.keep(f"{number + 1:032x}")
    assert entries(telemetry._shelf) < MANY / 2


def test_the_live_groups_forget_engines_that_are_gone(monkeypatch):
    monkeypatch.setattr(live_groups, "MAX_WRITERS", 16)
    groups, ref = LiveGroups(1e9, 2**30, 1), GroupRef("b/p", "key")
    for number in range(MANY):
        packet = Packet.of([Piece(ref, 0, number, np.array([number], np.int32))])
        groups.append(f"engine{number}", packet, 0.0)
    assert len(groups._writers) == 16
    tokens, _ = groups.fetch("new", [live_groups.Want(ref, live_groups.Cursor(0, 0))], 0.0)
    assert tokens.tokens.tolist() == list(range(MANY))
