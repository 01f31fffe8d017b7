"""The pool's processes: one store per node, back after a kill under the same address, gone with the application."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from waiting import WAIT_S, is_alive, until

from tailrace.kvpool.pool_config import PoolConfig
from tailrace.kvpool.status import PoolDown

pytestmark = pytest.mark.live

CONFIG = PoolConfig(dram_gib=0.125)
BLOCK_BYTES = 2**20


class Writer:
    """A client as an engine has one: no memory of its own in the pool."""

    def __init__(self, endpoint):
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self.buffer = np.random.default_rng(0).integers(0, 255, (64, BLOCK_BYTES), dtype=np.uint8)
        self.store, self.where = MooncakeDistributedStore(), ReplicateConfig()
        self.where.preferred_segment = endpoint.segment
        code = self.store.setup(endpoint.host, "P2PHANDSHAKE", 0, 2**20, "tcp", "", endpoint.master_address)
        assert code == 0
        self.store.register_buffer(self.buffer.ctypes.data, self.buffer.nbytes)

    def put(self, number: int) -> bool:
        address = self.buffer[number].ctypes.data
        return self.store.batch_put_from([f"key-{number}"], [address], [BLOCK_BYTES], self.where) == [0]

    def get(self, number: int) -> bool:
        """Whether the bytes come back as they were put."""
        read = self.store.get(f"key-{number}")
        return read == self.buffer[number].tobytes()


@contextmanager
def in_use(writer: Writer, number: int):
    """A key that is read again and again, so that its lease of 2 s ends on no machine before the block does."""
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.05):
            assert writer.get(number)

    assert writer.get(number)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            yield
        finally:
            ended.set()
        reading.result()


# ---- on Ray ------------------------------------------------------------------------------------------


def joining_app():
    from ray import serve

    @serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0})
    class Joins:
        def __init__(self):
            from tailrace.kvpool.pool import join_pool

            self.endpoint = join_pool(CONFIG, "pool-test")

        async def get(self):
            return self.endpoint

    return Joins.bind()


@pytest.fixture(scope="module")
def handle(deploy):
    return deploy(joining_app(), "pool-test")


@pytest.fixture(scope="module")
def endpoint(handle):
    return handle.get.remote().result(timeout_s=WAIT_S)


@pytest.fixture(scope="module")
def writer(endpoint):
    writer = Writer(endpoint)
    yield writer
    writer.store.close()


@pytest.fixture
def master(handle):
    from tailrace.kvpool.pool import ensure_pool

    return ensure_pool(CONFIG, "pool-test")


def status(master):
    import ray

    try:
        return ray.get(master.status.remote())
    except PoolDown:
        return None


def whole(master):
    """The status once the master runs, is connected, and one store is mounted."""

    def look():
        seen = status(master)
        return seen if seen and len(seen.store_nodes) == 1 and seen.store_nodes[0].segment else None

    return until(look)


def test_two_replicas_of_a_node_share_one_store(endpoint, master):
    seen = whole(master)
    assert endpoint.config == CONFIG and endpoint.master_address == seen.master_address
    (store,) = seen.store_nodes
    assert (store.segment, store.restarts, store.ssd) == (endpoint.segment, 0, "off")
    assert set(seen.segment_bytes) == {endpoint.segment}
    assert seen.dram_capacity_bytes == CONFIG.dram_gib * 2**30
    assert is_alive(store.pid) and is_alive(seen.master_pid)


def test_release_and_retire_forget_what_is_not_in_use(writer, master):
    import ray

    whole(master)
    assert all(writer.put(number) for number in range(8))
    assert status(master).dram_bytes == 8 * BLOCK_BYTES
    with in_use(writer, 3):
        assert ray.get(master.release.remote(["key-0", "key-1", "no such key"])) == (2, [])
        assert ray.get(master.retire.remote("^key-[2-5]$")) == 3, "key 3 is being read"
        assert ray.get(master.release.remote(["key-3", "key-6"])) == (1, ["key-3"])
    until(lambda: ray.get(master.release.remote(["key-3"])) == (1, []))
    seen = status(master)
    assert (seen.keys, seen.dram_bytes) == (1, BLOCK_BYTES)
    assert not writer.get(3) and writer.get(7)


def test_a_killed_store_is_back_under_its_name(writer, endpoint, master):
    (store,) = whole(master).store_nodes
    assert writer.put(10)
    os.kill(store.pid, signal.SIGKILL)

    def back():
        (now,) = whole(master).store_nodes
        return now if now.pid not in (None, store.pid) else None

    now = until(back)
    assert (now.segment, now.restarts) == (endpoint.segment, 1)
    until(lambda: writer.put(11) and writer.get(11))
    assert not writer.get(10), "a lost store is a lost cache"


def test_a_killed_master_is_back_at_its_address_and_empty(writer, master):
    import ray

    before = whole(master)
    until(lambda: writer.put(20))
    os.kill(before.master_pid, signal.SIGKILL)
    now = until(lambda: (seen := status(master)) and seen.master_pid not in (None, before.master_pid) and seen)
    assert (now.master_address, now.keys, now.master_restarts) == (before.master_address, 0, 1)
    until(lambda: (seen := status(master)) and seen.dram_capacity_bytes == CONFIG.dram_gib * 2**30)
    assert ray.get(master.release.remote(["key-20"])) == (0, []), "its admin client comes back as well"
    until(lambda: writer.put(21) and writer.get(21))


def test_a_program_dies_with_its_actor_which_is_started_again(writer, master):
    import ray

    before = whole(master)
    ray.kill(master, no_restart=False)
    until(lambda: not is_alive(before.master_pid))
    assert whole(master).master_address == before.master_address
    until(lambda: writer.put(30) and writer.get(30))


def test_nothing_is_left_when_the_application_is_deleted(writer, master):
    import ray
    from ray import serve

    seen = whole(master)
    serve.delete("pool-test")
    until(lambda: not any(map(is_alive, [seen.master_pid, seen.store_nodes[0].pid])))
    until(lambda: not [name for name in ray.util.list_named_actors(all_namespaces=True) if "pool-test" in str(name)])


# ---- without Ray: more stores, and an SSD ------------------------------------------------------------


@contextmanager
def processes(config: PoolConfig, stores: int):
    """A KvMaster and its stores on an event loop of this process; yields `run` for coroutines, and those objects."""
    from tailrace.kvpool.master import KvMaster
    from tailrace.kvpool.programs import free_port
    from tailrace.kvpool.store_node import KvStoreNode

    host = "127.0.0.1"
    with asyncio.Runner() as runner:

        async def start():
            master = KvMaster(config, host, free_port(host), free_port(host))
            nodes = [
                KvStoreNode(config, f"node-{i}", master.address, host, free_port(host), master.report)
                for i in range(stores)
            ]
            return master, nodes, [asyncio.create_task(node.run()) for node in nodes]

        master, nodes, tasks = runner.run(start())
        try:
            yield runner.run, master, nodes
        finally:
            for task in tasks:
                task.cancel()
            for each in (*nodes, master):
                runner.run(each.stop())


async def eventually(look):
    """As `until`, for a coroutine function; PoolDown counts as not yet."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            if answer := await look():
                return answer
        except PoolDown:
            pass
        assert time.monotonic() < deadline_s, "it did not happen"
        await asyncio.sleep(0.1)


def test_keys_move_to_another_segment():
    with processes(CONFIG, stores=2) as (run, master, nodes):
        ends = [run(node.endpoint(WAIT_S)) for node in nodes]
        writer = Writer(ends[0])
        assert all(writer.put(number) for number in range(4))
        keys = [f"key-{number}" for number in range(4)]
        assert sorted(run(eventually(lambda: master.move([*keys, "no such key"], ends[1].segment)))) == keys

        async def moved():
            return (await master.status()).segment_bytes[ends[1].segment] == 4 * BLOCK_BYTES

        assert run(eventually(moved))
        assert all(writer.get(number) for number in range(4))
        assert run(master.move(keys, ends[1].segment)) == [], "they are there"
        writer.store.close()


def test_the_ssd_keeps_what_memory_evicts_and_leaves_no_file(tmp_path):
    config = PoolConfig(dram_gib=1 / 32, ssd_path=str(tmp_path / "kv"), ssd_gib=0.25)
    with processes(config, stores=1) as (run, master, (node,)):
        writer = Writer(run(node.endpoint(WAIT_S)))

        async def has_disk(at_least_bytes=0):
            seen = await master.status()
            return seen.ssd_capacity_bytes and seen.ssd_bytes >= at_least_bytes

        run(eventually(has_disk))
        for number in range(64):  # twice the memory
            assert run(eventually(lambda number=number: asyncio.to_thread(writer.put, number)))
            if number % 16 == 15:  # memory holds 30: what is next is written to the SSD before it is evicted
                run(eventually(lambda number=number: has_disk((number + 1) * BLOCK_BYTES)))
        seen = run(master.status())
        assert seen.keys == 64 and seen.dram_bytes < 64 * BLOCK_BYTES
        assert [store.ssd for store in seen.store_nodes] == ["on"]
        assert all(writer.get(number) for number in range(64))
        assert list((tmp_path / "kv").iterdir()) == [] and (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
        writer.store.close()


def test_where_nothing_can_be_written_there_is_memory_alone():
    with processes(PoolConfig(dram_gib=0.125, ssd_path="/proc/tailrace"), stores=1) as (run, master, (node,)):
        writer = Writer(run(node.endpoint(WAIT_S)))
        assert writer.put(1) and writer.get(1)
        (store,) = run(eventually(master.status)).store_nodes
        assert store.ssd.startswith("/proc/tailrace: ") and "\n" not in store.ssd
        writer.store.close()


def test_a_dead_master_is_one_line_at_once():
    with processes(CONFIG, stores=0) as (run, master, _):
        run(eventually(master.status))
        run(master.stop())
        with pytest.raises(PoolDown, match=r"^mooncake_master is not running"):
            run(master.release(["key-1"]))


def test_a_store_that_leaves_hands_its_keys_over_and_one_that_comes_back_is_new():
    from tailrace.kvpool.programs import free_port
    from tailrace.kvpool.store_node import KvStoreNode

    with processes(CONFIG, stores=2) as (run, master, nodes):
        ends = [run(node.endpoint(WAIT_S)) for node in nodes]
        writers = [Writer(end) for end in ends]
        assert all(writers[0].put(number) for number in range(40)) and writers[1].put(50)
        run(nodes[0].endpoint(WAIT_S, "engine", 0.0))

        async def left():
            status = await master.status()
            return status if status.left_stores else None

        status = run(eventually(left))
        assert (status.handed_keys, status.handed_bytes, status.lost_keys) == (40, 40 * BLOCK_BYTES, 0)
        run(nodes[0].stop())

        async def one_left():
            return set((await master.status()).segment_bytes) == {ends[1].segment}

        run(eventually(one_left))
        assert all(writers[1].get(number) for number in (*range(40), 50)), "nothing is lost"
        print({"handed_keys": status.handed_keys, "bytes": status.handed_bytes, "ms": status.hand_over_ms})

        run(nodes[1].endpoint(WAIT_S, "engine", 0.0))
        run(asyncio.sleep(3.0))
        assert run(master.status()).left_stores == 1, "the last store stays while it has a key"

        async def comes():
            port = free_port("127.0.0.1")
            node = KvStoreNode(CONFIG, "node-0", master.address, "127.0.0.1", port, master.report)
            return node, asyncio.create_task(node.run())

        node, reporting = run(comes())
        nodes.append(node)
        run(node.endpoint(WAIT_S))

        async def both_left():
            return (await master.status()).left_stores == 2

        run(eventually(both_left))
        assert all(writers[0].get(number) for number in range(40))
        reporting.cancel()
