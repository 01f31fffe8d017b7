"""The coordinator's side of the pool: a cache, never a dependency, and bounded over weeks of replicas."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from virtual_story import play_in

from tailrace.deployments.coordinator import kv_pool_manager
from tailrace.deployments.coordinator.kv_pool_manager import MAX_GONE, SUMMED_REPLICAS, KvPoolManager
from tailrace.kvpool.keys import NAME_BYTES
from tailrace.kvpool.status import PoolDown, PoolStatus, StoreNodeStatus
from tailrace.lab.fuzz.virtual_time import VirtualLoop
from tailrace.policies.protocol.actions import ReleaseCause, ReleaseKv
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


def test_sums_over_many_replicas_are_made_less_often_and_never_fall():
    manager, seen = KvPoolManager(None), []
    for hits in range(1, 9):
        manager.learn([report(f"r{number}", hits) for number in range(4 * SUMMED_REPLICAS)])
        seen.append(manager.view().counts["pool_tokens"] // (4 * SUMMED_REPLICAS))
    assert seen == [1, 1, 1, 1, 5, 5, 5, 5]
    for _ in range(3):
        manager.learn([])  # all are gone, and most of their counts are summed apart
        seen.append(manager.view().counts["pool_tokens"] // (4 * SUMMED_REPLICAS))
    assert seen[8:] == [8, 8, 8]


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

    view, events = play_in(VirtualLoop(), polled)
    assert events == [] and view.counts["retire_failed"] == 1
    assert view.problem.startswith(type(error).__name__)


PROMPT, SHORT = np.arange(40, dtype=np.int32), np.arange(3, dtype=np.int32)


def name(number: int) -> bytes:
    """The name of a block, as replicas report it."""
    return bytes([number]) * NAME_BYTES


class Recording:
    """A master that notes its operations. `in_use`: keys of a release that are in use at first, by their numbers."""

    def __init__(self, in_use: tuple[int, ...] = ()):
        self.calls: list[tuple[str, list[int]]] = []
        self._in_use = in_use

    def __getattr__(self, method: str):
        async def call(keys, *rest):
            numbers = [int(key.partition("@")[2][:2], 16) for key in keys] if isinstance(keys, list) else [keys]
            self.calls.append((method, numbers))
            busy, self._in_use = [key for key in keys if int(key.partition("@")[2][:2], 16) in self._in_use], ()
            return (len(keys) - len(busy), busy) if method == "release" else len(keys)

        return SimpleNamespace(remote=call)


def played(master, play) -> None:
    """Run `play(manager)` beside the manager's work."""

    async def story():
        manager = KvPoolManager(master)
        manager.learn([report("r", 0)])
        working = asyncio.ensure_future(manager.work())
        await play(manager)
        await asyncio.sleep(0)
        working.cancel()

    play_in(VirtualLoop(), story)


def test_a_release_before_the_first_report_is_done_once_the_prefix_is_known():
    async def story():
        master = Recording()
        manager = KvPoolManager(master)
        manager.release(batch_of(PROMPT, (1, 2, 3)), release(None))
        manager.learn([])
        assert not manager._todo
        manager.learn([report("r", 0)])
        manager.learn([report("r", 0)])
        working = asyncio.ensure_future(manager.work())
        await asyncio.sleep(0.01)
        working.cancel()
        return master.calls

    assert play_in(VirtualLoop(), story) == [("release", [1, 2, 3])]


def batch_of(prompt: np.ndarray, *samples: tuple[int, ...]) -> SimpleNamespace:
    """A batch of one group, whose samples have blocks of these numbers."""
    group = SimpleNamespace(prompt=prompt, prompt_kv_names=set())
    found = [sample_of(group, prompt, b"".join(map(name, numbers))) for numbers in samples]
    group.samples = found
    samples = {f"g#{place}": one for place, one in enumerate(found)}
    return SimpleNamespace(groups={"g": group}, samples=samples, namesakes=lambda group_id: [])


def sample_of(group, prompt: np.ndarray, names: bytes) -> SimpleNamespace:
    """A sample whose context is its prompt and the numbers after it."""
    tokens = np.arange(16 * len(names) // NAME_BYTES, dtype=np.int32)
    context = np.concatenate([prompt, tokens[len(prompt) :]])
    return SimpleNamespace(group=group, prompt=prompt, context=lambda: context, kv_names=names, end=None, hold_s=9.0)


def release(sample_id: str | None) -> ReleaseKv:
    return ReleaseKv("g", sample_id, ReleaseCause.ENDED, "test")


@pytest.mark.parametrize(
    ("prompt", "mate", "own", "shared"), [(PROMPT, (1, 2, 5), [3, 4], [1, 2]), (SHORT, (5, 6, 7), [1, 2, 3, 4], None)]
)
def test_a_sample_releases_its_own_blocks_and_the_group_those_of_the_prompt(prompt, mate, own, shared):
    """Blocks have 16 tokens: a prompt of 40 has two whole ones, which its mates read."""
    master, batch = Recording(), batch_of(prompt, (1, 2, 3, 4), mate)

    async def play(manager):
        manager.release(batch, release("g#0"))
        await asyncio.sleep(0.01)
        assert master.calls == [("release", own)]
        manager.release(batch, release("g#0"))
        await asyncio.sleep(0.01)
        assert len(master.calls) == 1, "they have been released"
        manager.release(batch, release(None))
        await asyncio.sleep(0.01)
        if shared is not None:
            assert sorted(master.calls[1][1]) == shared

    played(master, play)


def test_the_last_of_mates_with_the_same_first_tokens_releases_the_blocks_of_these():
    """Three answers begin alike; the third has ended in that block."""
    master, batch = Recording(), batch_of(PROMPT, (1, 2, 3, 4, 5), (1, 2, 3, 6), (1, 2, 3), (1, 2, 7))

    async def play(manager):
        for place in range(4):
            manager.release(batch, release(f"g#{place}"))
        await asyncio.sleep(0.01)
        assert master.calls == [("release", [4, 5]), ("release", [6]), ("release", [3]), ("release", [7])]

    played(master, play)


def test_blocks_that_a_branch_has_too_stay_until_it_releases_them():
    """A sample of 5 blocks ends; a branch, in a group of its own, has the first three of them."""
    master, batch, other = Recording(), batch_of(PROMPT, (1, 2, 3, 4, 5)), batch_of(PROMPT, (1, 2, 3, 6))
    branch = other.groups["g"]
    batch.namesakes, other.namesakes = lambda group_id: [branch], lambda group_id: [batch.groups["g"]]
    batch.samples["g#0"].end = "stop"

    async def play(manager):
        manager.release(batch, release("g#0"))
        manager.release(batch, release(None))
        await asyncio.sleep(0.01)
        assert master.calls == [("release", [4, 5])]
        manager.release(other, release("g#0"))
        manager.release(other, release(None))
        await asyncio.sleep(0.01)
        assert master.calls[1:] == [("release", [3, 6]), ("release", [1, 2])]

    played(master, play)


@pytest.mark.parametrize("reads", [True, False], ids=["it reads them", "it ends before"])
def test_blocks_that_a_branch_is_yet_to_read_stay_until_its_first_chunk_has_ended(reads):
    """A branch without a chunk so far has 56 tokens, three blocks, in common with a sample of five that is released."""
    alike = np.concatenate([np.arange(56), [0] * 10]).astype(np.int32)
    master, batch, other = Recording(), batch_of(PROMPT, (1, 2, 3, 4, 5)), batch_of(alike, ())
    batch.samples["g#0"].end = "stop"
    branch, groups = other.samples["g#0"], [batch.groups["g"], other.groups["g"]]
    batch.namesakes, other.namesakes = lambda group_id: groups[1:], lambda group_id: groups[:1]

    async def play(manager):
        async def released() -> list:
            await manager.poll(0.0)
            await asyncio.sleep(0.01)
            return [numbers for _, numbers in master.calls]

        manager.release(batch, release("g#0"))
        manager.release(batch, release(None))
        assert await released() == [[4, 5]]
        if reads:
            branch.kv_names = b"".join(map(name, (1, 2, 3, 6)))
            assert await released() == [[4, 5]]
            manager.release(other, release("g#0"))
            manager.release(other, release(None))
            assert await released() == [[4, 5], [1, 2, 3, 6]], "its prompt has four blocks"
        else:
            branch.end, branch.hold_s = "cancelled", 0.0
            assert await released() == [[4, 5], [3], [1, 2]]

    played(master, play)


def test_keys_in_use_are_released_later_and_no_others(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(KvPoolManager, "_clock", lambda self: now[0])
    master, batch = Recording(in_use=(4,)), batch_of(PROMPT, (1, 2, 3, 4))

    async def play(manager):
        manager.release(batch, release("g#0"))
        await asyncio.sleep(0.01)
        manager._ask = lambda *asked: asyncio.sleep(0)  # the poll's own question
        await manager.poll(0.0)
        assert master.calls == [("release", [3, 4])], "not before its time"
        now[0] = kv_pool_manager.AGAIN_S
        await manager.poll(0.0)
        assert list(manager._todo) == [("release", [[f"tailrace-0@{name(4).hex()}"]])]

    played(master, play)


def test_the_pool_is_swept_after_two_idle_polls_and_never_while_a_batch_is_in_flight():
    master = Recording()

    async def play(manager):
        manager._status = SimpleNamespace(keys=7)
        for idle in (True, False, True, False, False, True):
            manager.rest(idle)
        assert not manager._todo and manager._idle_polls == 1
        manager.rest(idle=True)
        assert [method for method, _ in manager._todo] == ["retire"]

    played(master, play)


def test_swept_keys_are_blocks_that_a_sweep_removed_and_no_staged_weights():
    master, removed = Recording(), iter([3, 0, 0])

    async def retire(regex: str) -> int:
        return next(removed)

    async def play(manager):
        master.retire = SimpleNamespace(remote=retire)
        manager._status = SimpleNamespace(keys=7)  # those of staged weights among them
        for _ in range(4):
            manager.rest(idle=True)
            await asyncio.sleep(0.01)
        assert next(removed, None) is None and manager._counts["swept_keys"] == 3

    played(master, play)


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
