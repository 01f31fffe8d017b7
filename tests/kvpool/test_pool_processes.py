"""The pool's master and the store of a node, without their processes: what they are started with, and when they end."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from virtual_story import play_in

from tailrace.kvpool import master, programs, store_node
from tailrace.kvpool.keys import block_name
from tailrace.kvpool.master import COUNTS, REPORT_S, STALE_S, UNMOUNTED_S, KvMaster
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.kvpool.programs import PORTS, free_port, program
from tailrace.kvpool.status import MasterAnswer, PoolDown, StoreNodeStatus
from tailrace.kvpool.store_node import FIRST_LEASE_S, REMOUNT_S, SSD_FILE, KvStoreNode, ssd_folder
from tailrace.lab.fuzz.virtual_time import VirtualLoop

CONFIG = PoolConfig(dram_gib=2.0, protocol="rdma", rdma_devices="mlx5_0", load_deadline_s=3.5)
STORE = {"node_id": "n", "host": "h", "pid": 1, "restarts": 0, "ssd": "off"}


class Child:
    """A process that never starts."""

    def __init__(self, name: str, launch):
        self.name, self.launch, self.pid, self.restarts, self.kills, self.stops = name, launch, 7, 2, 0, 0

    def last_line(self) -> str:
        return "E0101 it is broken"

    def kill(self) -> None:
        self.kills += 1

    def stop(self) -> None:
        self.stops += 1


class Admin:
    """The pool's admin client. `mounted`: the segments, or an error."""

    def __init__(self, *given):
        self.given, self.mounted, self.connects, self.looks, self.closes = given, {"s:1": "a"}, 0, 0, 0
        self.counts = {name: float(number) for number, name in enumerate(COUNTS)}
        self.known: list[str] = []

    async def segments(self) -> dict[str, str]:
        self.looks += 1
        if isinstance(self.mounted, Exception):
            raise self.mounted
        return self.mounted

    async def connect(self) -> None:
        self.connects += 1

    async def release(self, keys):
        return len(keys), ["x"]

    async def retire(self, regex):
        return len(regex)

    async def move(self, keys, segment):
        return f"{len(keys)} to {segment}"

    async def metrics(self, names):
        assert names == COUNTS
        return self.counts, {"s:1": 64}

    async def keys(self):
        return self.known

    async def keys_at(self, segment):
        return {}

    def close(self) -> None:
        self.closes += 1


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch):
    for module in (master, store_node):
        monkeypatch.setattr(module, "ChildProcess", Child)
    monkeypatch.setattr(master, "PoolAdmin", Admin)


def play(story, monkeypatch) -> None:
    loop = VirtualLoop()
    for module in (master, store_node):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    play_in(loop, story)


def store(segment: str = "s:1", **fields) -> StoreNodeStatus:
    return StoreNodeStatus(**STORE | {"segment": segment} | fields)


# ---- the master -----------------------------------------------------------------------------------------


def test_a_master_answers_where_it_is_and_operates_on_the_whole_pool(monkeypatch):
    async def story():
        one = KvMaster(CONFIG, "10.0.0.1", 50051, 80)
        assert one._admin.given == ("10.0.0.1", "10.0.0.1:50051", "10.0.0.1:80", "rdma", "mlx5_0")
        assert await one.where() == one.address == "10.0.0.1:50051"
        assert await one.release(["a", "b"]) == (2, ["x"]) and await one.retire("^abc") == 4
        assert await one.move(["a"], "s:1") == "1 to s:1"
        name = block_name(3, bytes(32)).hex()
        one._admin.known = [f"tailrace-{'0' * 16}@{name}", f"tailrace-{'1' * 16}@{name}", "tailrace-probe-1-0"]
        assert await one.keys_by_version() == {3: 2}
        one._process.pid = None
        for work in (one.release([]), one.retire("x"), one.move([], "s"), one.status(), one.keys_by_version()):
            with pytest.raises(PoolDown, match="mooncake_master is not running: E0101 it is broken"):
                await work

    play(story, monkeypatch)


def test_the_status_has_each_count_under_its_name_and_stores_that_are_heard(monkeypatch):
    async def story():
        one = KvMaster(CONFIG, "10.0.0.1", 50051, 80)
        await one.report(store(node_id="old"), "s:1")
        await asyncio.sleep(STALE_S)
        await one.report(store(node_id="new"), "s:1")
        status = await one.status()
        found = {key: value for key, value in status.model_dump().items() if value}
        nodes = found.pop("store_nodes")
        assert [node["node_id"] for node in nodes] == ["new"]
        assert found == {
            "master_address": "10.0.0.1:50051", "pages_address": "10.0.0.1:80", "master_pid": 7, "master_restarts": 2,
            "dram_bytes": 1, "dram_capacity_bytes": 2, "ssd_bytes": 3, "ssd_capacity_bytes": 4, "evicted_keys": 5,
            "put_failures": 6 + 7 + 8 + 9, "get_failures": 10 + 11, "segment_bytes": {"s:1": 64},
        }  # fmt: skip

    play(story, monkeypatch)


def test_a_store_hears_whether_it_is_mounted_and_that_it_may_end_once_it_has_left(monkeypatch):
    async def story():
        one = KvMaster(CONFIG, "10.0.0.1", 50051, 80)
        answer = await one.report(store(), "s:1")
        assert answer == MasterAnswer(master_address="10.0.0.1:50051", mounted=None), "it has not looked yet"
        await asyncio.sleep(0.1)
        assert (await one.report(store(), "s:1")).mounted is True and one._admin.connects == 1
        assert (await one.report(store(), "s:2")).mounted is False
        assert not (await one.report(store(leaving=True), "s:1")).may_end
        await asyncio.sleep(1.0)
        assert (await one.report(store(leaving=True), "s:1")).may_end
        assert (await one.status()).store_nodes == () and (await one.status()).left_stores == 1
        one._admin.mounted = PoolDown("away")
        await asyncio.sleep(2 * REPORT_S)
        assert (await one.report(store(), "s:1")).mounted is None

    play(story, monkeypatch)


def test_an_odd_answer_of_the_master_process_does_not_end_the_watch(monkeypatch):
    async def story():
        one = KvMaster(CONFIG, "10.0.0.1", 50051, 80)
        await asyncio.sleep(0.1)
        one._admin.mounted = KeyError("segments")
        await asyncio.sleep(2 * REPORT_S)
        assert (await one.report(store(), "s:1")).mounted is None
        one._admin.mounted = {"s:1": "a"}
        await asyncio.sleep(2 * REPORT_S)
        assert (await one.report(store(), "s:1")).mounted is True

    play(story, monkeypatch)


def test_a_master_looks_seldom_and_soon_where_a_store_is_not_mounted(monkeypatch):
    async def story():
        one = KvMaster(CONFIG, "10.0.0.1", 50051, 80)
        await asyncio.sleep(10 * REPORT_S + 0.1)
        assert one._admin.looks == 11
        await asyncio.sleep(UNMOUNTED_S)
        await one.report(store(), "s:1")
        await asyncio.sleep(0.1)
        assert one._admin.looks == 11
        await one.report(store(segment=""), "s:1")
        await asyncio.sleep(0.1)
        assert one._admin.looks == 12
        for _ in range(10):
            await one.report(store(segment=""), "s:1")
            await asyncio.sleep(UNMOUNTED_S / 10)
        assert one._admin.looks == 13, "and not at every report"

    play(story, monkeypatch)


def test_a_master_that_is_stopped_ends_its_process_and_looks_no_more(monkeypatch):
    async def story():
        one = KvMaster(CONFIG, "10.0.0.1", 50051, 80)
        await one.report(store(leaving=True), "s:1")
        await asyncio.sleep(0.1)
        await one.stop()
        looks = one._admin.looks
        await asyncio.sleep(100.0)
        assert (one._process.stops, one._admin.closes, one._admin.looks) == (1, 1, looks)
        assert len(asyncio.all_tasks()) == 1

    play(story, monkeypatch)


def options_of(command: list[str]) -> dict[str, str]:
    return dict(one.removeprefix("-").split("=", 1) for one in command[1:])


@pytest.fixture
def mooncake(monkeypatch) -> Path:
    spec = SimpleNamespace(origin="/site/mooncake/__init__.py")
    monkeypatch.setattr(programs, "find_spec", lambda name: spec if name == "mooncake" else None)
    return Path("/site/mooncake")


@pytest.mark.parametrize("ssd", [None, "/ssd"])
def test_a_master_is_started_with_its_own_ports_and_bounds(monkeypatch, mooncake, ssd):
    async def story():
        one = KvMaster(CONFIG.model_copy(update={"ssd_path": ssd}), "10.0.0.1", 50051, 80)
        command, environment = one._process.launch()
        assert command[0] == str(mooncake / "mooncake_master") and environment == {}
        given = options_of(command)
        wanted = {
            "rpc_address": "10.0.0.1", "rpc_port": "50051", "metrics_host": "10.0.0.1", "metrics_port": "80",
            "default_kv_lease_ttl": "3500", "enable_offload": "false" if ssd is None else "true", "client_ttl": "3",
            "put_start_discard_timeout_sec": "30", "put_start_release_timeout_sec": "60", "logtostderr": "true",
            "eviction_high_watermark_ratio": "0.95", "enable_metric_reporting": "false",
        }  # fmt: skip
        assert given == wanted

    play(story, monkeypatch)


# ---- a node's store -------------------------------------------------------------------------------------


class Node:
    """A store, and its master: `answer` is given to each report, `reports` has them."""

    def __init__(self, config: PoolConfig = CONFIG):
        self.answer, self.reports, self.times = MasterAnswer(master_address="10.0.0.1:1", mounted=True), [], []
        self.store = KvStoreNode(config, "n", "10.0.0.1:1", "10.0.0.2", 17, self._report)
        self.running = asyncio.ensure_future(self.store.run())

    async def _report(self, status: StoreNodeStatus, segment: str):
        assert segment == "10.0.0.2:17"
        self.reports.append(status)
        self.times.append(asyncio.get_running_loop().time())
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def become(self, **fields) -> None:
        self.answer = self.answer.model_copy(update=fields)


def test_an_engine_gets_the_endpoint_once_the_memory_is_mounted_and_waits_no_longer_than_it_said(monkeypatch):
    async def story():
        node = Node()
        node.become(mounted=False)
        with pytest.raises(PoolDown, match=r"no pool memory on 10\.0\.0\.2 after 3 s: E0101 it is broken"):
            await node.store.endpoint(3.0)
        assert asyncio.get_running_loop().time() == 3.0
        waiting = asyncio.ensure_future(node.store.endpoint(60.0, "engine"))
        await asyncio.sleep(0.1)
        node.become(mounted=True)
        endpoint = await waiting
        assert asyncio.get_running_loop().time() <= 3.1 + UNMOUNTED_S
        assert endpoint == store_node.PoolEndpoint("10.0.0.1:1", "10.0.0.2", "10.0.0.2:17", CONFIG)
        node.become(mounted=False)
        await asyncio.sleep(2 * REPORT_S)
        assert node.reports[-1].segment == ""
        with pytest.raises(PoolDown):
            await node.store.endpoint(1.0)

    play(story, monkeypatch)


def test_a_store_reports_seldom_while_it_is_mounted_and_often_while_it_is_not(monkeypatch):
    async def story():
        node = Node()
        await asyncio.sleep(3 * REPORT_S + 0.1)
        assert node.times == [0.0, REPORT_S, 2 * REPORT_S, 3 * REPORT_S]
        first, second = node.reports[:2]
        assert (first.segment, second.segment) == ("", "10.0.0.2:17")
        assert (second.node_id, second.host, second.pid, second.restarts, second.ssd, second.leaving) == (
            "n", "10.0.0.2", 7, 2, "off", False,
        )  # fmt: skip
        node.become(mounted=False)
        await asyncio.sleep(REPORT_S)
        count = len(node.times)
        await asyncio.sleep(4 * UNMOUNTED_S)
        assert len(node.times) == count + 4

    play(story, monkeypatch)


def test_a_store_leaves_when_the_last_lease_has_run_out_and_ends_when_it_may(monkeypatch):
    async def story():
        node = Node()
        await node.store.endpoint(1.0, "a", 10.0)
        await node.store.endpoint(1.0, "b", 30.0)
        await asyncio.sleep(20.0)
        await node.store.endpoint(1.0, "a", 5.0)
        await asyncio.sleep(8.0)
        assert not node.reports[-1].leaving, "b's lease runs"
        await asyncio.sleep(5.0)
        assert node.reports[-1].leaving and not node.running.done()
        await node.store.endpoint(1.0, "a", 10.0)
        node.become(may_end=True)
        await asyncio.sleep(5.0)
        assert not node.reports[-1].leaving and not node.running.done(), "it is needed again"
        await asyncio.sleep(10.0)
        assert node.running.done() and node.running.result() is None

    play(story, monkeypatch)


def test_a_store_stays_for_its_first_engine_and_leaves_at_once_when_asked(monkeypatch):
    async def story():
        node = Node()
        await asyncio.sleep(FIRST_LEASE_S - 5.0)
        assert not node.reports[-1].leaving
        await asyncio.sleep(10.0)
        assert node.reports[-1].leaving
        other = Node()
        await other.store.endpoint(1.0, "a", 1000.0)
        await other.store.leave()
        await asyncio.sleep(2 * REPORT_S)
        assert other.reports[-1].leaving
        await other.store.endpoint(1.0, "a", 1000.0)
        await asyncio.sleep(2 * REPORT_S)
        assert not other.reports[-1].leaving, "a holder has renewed its lease"
        third = Node()
        await third.store.endpoint(1.0, "a", 10.0)
        await asyncio.sleep(15.0)
        assert third.reports[-1].leaving, "the first lease is for an engine that has not come yet"

    play(story, monkeypatch)


def test_a_store_whose_segment_is_unknown_for_long_is_started_again_and_not_before(monkeypatch):
    async def story():
        node = Node()
        await asyncio.sleep(5.0)
        node.become(mounted=False)
        await asyncio.sleep(REMOUNT_S - 1.0)
        assert node.store._process.kills == 0
        await asyncio.sleep(3.0)
        assert node.store._process.kills == 1
        await asyncio.sleep(REMOUNT_S - 4.0)
        assert node.store._process.kills == 1, "it gets its time to mount"
        node.answer = None  # the master is away: nothing is known
        await asyncio.sleep(10 * REMOUNT_S)
        assert node.store._process.kills == 1
        node.answer = MasterAnswer(master_address="10.0.0.1:1", mounted=None)
        await asyncio.sleep(10 * REMOUNT_S)
        assert node.store._process.kills == 1

    play(story, monkeypatch)


def test_a_store_goes_to_a_master_at_another_address_once(monkeypatch, mooncake):
    async def story():
        node = Node()
        await asyncio.sleep(1.0)
        node.become(master_address="10.0.0.3:1")
        await asyncio.sleep(REPORT_S)
        assert node.store._process.kills == 1
        command, _ = node.store._process.launch()
        assert options_of(command)["master_server_address"] == "10.0.0.3:1"
        await asyncio.sleep(10 * REPORT_S)
        assert node.store._process.kills == 1
        assert (await node.store.endpoint(1.0)).master_address == "10.0.0.3:1"

    play(story, monkeypatch)


def test_a_store_whose_master_is_gone_for_good_ends(monkeypatch):
    async def story():
        node = Node()
        node.answer = ConnectionError("gone")
        await asyncio.wait({node.running})
        assert isinstance(node.running.exception(), ConnectionError)
        await node.store.stop()
        assert node.store._process.stops == 1

    play(story, monkeypatch)


def test_a_store_is_started_with_its_segment_and_size(monkeypatch, mooncake, tmp_path):
    wanted = {
        "host": "10.0.0.2:17", "port": "17", "master_server_address": "10.0.0.1:1", "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": str(2 << 30), "protocol": "rdma", "device_names": "mlx5_0",
    }  # fmt: skip

    async def story():
        command, environment = Node().store._process.launch()
        assert command[0] == str(mooncake / "mooncake_client")
        assert options_of(command) == wanted and environment == {}
        ssd = CONFIG.model_copy(update={"ssd_path": str(tmp_path / "ssd"), "ssd_gib": 0.001})
        node = Node(ssd)
        command, environment = node.store._process.launch()
        assert options_of(command) == wanted | {"enable_offload": "true", "start_offload_rpc_server": "false"}
        folder = Path(environment.pop("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"))
        assert folder.parent == tmp_path / "ssd" and folder.stat().st_mode & 0o777 == 0o700
        assert {name.removeprefix("MOONCAKE_OFF"): value for name, value in environment.items()} == {
            "LOAD_STORAGE_BACKEND_DESCRIPTOR": "offset_allocator_storage_backend",
            "SET_EVICTION_POLICY": "fifo",
            "LOAD_TOTAL_SIZE_LIMIT_BYTES": str(int(0.001 * 2**30)),
            "LOAD_LOCAL_BUFFER_SIZE_BYTES": str(128 << 20),
            "LOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        }
        assert node.store._status().ssd == "on"
        await node.store.stop()
        assert not folder.exists()

    play(story, monkeypatch)


def test_the_file_on_an_ssd_loses_its_name_once_the_process_has_it_open(monkeypatch, tmp_path):
    async def story():
        node = Node(CONFIG.model_copy(update={"ssd_path": str(tmp_path), "ssd_gib": 0.001}))
        one, child = node.store, node.store._process
        child.pid = None
        one._forget_file()
        child.pid = int(Path("/proc/self").readlink().name)
        one._forget_file()
        file = one._folder / SSD_FILE
        file.write_bytes(b"kv")
        child.pid = None
        one._forget_file()
        child.pid = 2**22 + 1  # there is no such process
        one._forget_file()
        child.pid = int(Path("/proc/self").readlink().name)
        one._forget_file()
        assert file.exists(), "nobody has it open"
        with file.open("rb"):
            one._forget_file()
            assert not one._folder.exists()

    play(story, monkeypatch)


def test_an_ssd_without_room_or_that_cannot_be_written_is_said_in_one_line(tmp_path):
    folder, said = ssd_folder(CONFIG.model_copy(update={"ssd_path": str(tmp_path), "ssd_gib": 10.0**9}))
    assert folder is None and "GiB free, ssd_gib asks for 1000000000.0" in said
    (tmp_path / "file").write_text("")
    folder, said = ssd_folder(CONFIG.model_copy(update={"ssd_path": str(tmp_path / "file")}))
    assert folder is None and said == f"{tmp_path / 'file'}: File exists"
    assert ssd_folder(CONFIG) == (None, "off")


# ---- programs and ports ---------------------------------------------------------------------------------


def test_a_program_is_beside_the_package_and_its_absence_says_how_to_install_it(monkeypatch, mooncake):
    assert program("name", {"a": 1, "b": "c"}) == [str(mooncake / "name"), "-a=1", "-b=c"]
    for spec in (None, SimpleNamespace(origin=None)):
        monkeypatch.setattr(programs, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(ModuleNotFoundError, match="the KV pool needs Mooncake: pip install mooncake"):
            program("name", {})


def test_a_free_port_is_one_that_can_be_listened_to_and_in_its_range(monkeypatch):
    port = free_port("127.0.0.1")
    assert port in PORTS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        other = free_port("127.0.0.1")
        assert other != port
        monkeypatch.setattr(programs.random, "sample", lambda ports, k: [port, other])
        assert free_port("127.0.0.1") == other
        monkeypatch.setattr(programs.random, "sample", lambda ports, k: [port] * k)
        with pytest.raises(OSError, match=r"no free port on 127\.0\.0\.1 in 20000-32000"):
            free_port("127.0.0.1")
