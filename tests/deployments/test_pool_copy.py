"""Copies of staged weights in the pool, over a store of memory: whole or not there, and of their own version alone."""

import ctypes
import fcntl
import os
import re
import shutil
import stat
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from tailrace.deployments.staging import pool_copy, verified
from tailrace.deployments.staging.pool_copy import key_of, pull, put
from tailrace.deployments.staging.slots import MemorySource, Slots, slot_of
from tailrace.deployments.staging.stage import Stage
from tailrace.deployments.staging.verified import Verifier
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.kvpool.status import PoolDown

CONFIG = PoolConfig(protocol="rdma", rdma_devices="mlx5_0")
ENDPOINT = PoolEndpoint("10.0.0.1:50051", "10.0.0.2", "10.0.0.2:17000", CONFIG)
PIECE_BYTES = 4096
TENSORS = {
    "model.a/b": np.arange(5, dtype=np.float64),
    "large": np.arange(3 * PIECE_BYTES // 4 + 7, dtype=np.float32),
    "empty": np.zeros((0, 2), np.int8),
}


class Store:
    """Mooncake's store in memory. `lacks`: keys that are gone; `full`: keys that do not fit."""

    def __init__(self):
        self.values: dict[str, bytes] = {}
        self.lacks, self.full, self.refuses = set(), set(), False
        self.buffers: dict[int, int] = {}
        self.opened, self.closed, self.setups, self.down = 0, 0, [], 0

    def setup(self, *given) -> int:
        self.setups.append(given)
        self.opened += 1
        return self.down

    def close(self) -> None:
        self.closed += 1

    def register_buffer(self, address: int, size: int) -> int:
        if self.refuses:
            return -200
        self.buffers[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.buffers[address]
        return 0

    def _is_registered(self, address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + length for begin, length in self.buffers.items())

    def put(self, key: str, value: bytes) -> int:
        if any(name in key for name in self.full):
            return -10
        self.values[key] = bytes(value)
        return 0

    def put_from(self, key: str, address: int, size: int) -> int:
        assert self._is_registered(address, size)
        return self.put(key, ctypes.string_at(address, size))

    def get(self, key: str) -> bytes:
        return b"" if key in self.lacks else self.values.get(key, b"")

    def get_into(self, key: str, address: int, size: int) -> int:
        value = self.get(key)
        assert self._is_registered(address, size) and len(value) <= size
        ctypes.memmove(address, value, len(value))
        return len(value) or -1

    def is_exist(self, key: str) -> int:
        return int(key in self.values and key not in self.lacks)

    def remove_by_regex(self, form: str, force: bool) -> int:
        assert force
        self.values = {key: value for key, value in self.values.items() if not re.search(form, key)}
        return 0


class Keeper:
    """Of another node. `answer`: what `publish` gives, or raises, or a function that does it."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []
        self.publish = SimpleNamespace(remote=self._publish)

    def _publish(self, source, pool):
        self.asked.append((source, pool))
        return self.answer() if callable(self.answer) else self.answer


@pytest.fixture
def store(monkeypatch):
    """A store, and the modules of Ray and Mooncake that lead to it. `store.keepers`: of other nodes."""
    store = Store()
    store.keepers, store.joined, store.pool_down = [], [], False

    def get(answer, timeout: float):
        if isinstance(answer, Exception):
            raise answer
        return answer

    def join_pool(pool, app_name):
        if store.pool_down:
            raise PoolDown("no master")
        store.joined.append((pool, app_name))
        return ENDPOINT

    fakes = {
        "mooncake": {},
        "mooncake.store": {"MooncakeDistributedStore": lambda: store},
        "ray": {"get": get},
        "tailrace.kvpool.pool": {"join_pool": join_pool},
        "tailrace.deployments.staging.keeper": {"keepers": lambda service: store.keepers},
    }
    for name, members in fakes.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(pool_copy, "PIECE_BYTES", PIECE_BYTES)
    return store


@pytest.fixture
def here(tmp_path) -> Path:
    return folder_of(tmp_path, "here")


@pytest.fixture
def there(tmp_path) -> Path:
    return folder_of(tmp_path, "there")


def folder_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def staged(root: Path, version: int = 7, tensors=TENSORS) -> tuple[MemorySource, Path]:
    stage = Stage(Slots("app-0", root), version, (0, ""))
    for name, tensor in tensors.items():
        stage.add(name, tensor)
    source = stage.seal()
    return source, slot_of(source, root)


def published(store: Store, root: Path, version: int = 7, tensors=TENSORS) -> MemorySource:
    source, folder = staged(root, version, tensors)
    put(source, folder, ENDPOINT)
    return source


def test_another_node_pulls_weights_bit_for_bit(store, here, there):
    source = published(store, there)
    assert store.values[key_of(source, "")].decode().split("\n") == [source.digest, "model-00000.safetensors"]
    large = [len(store.values[key_of(source, "large", piece)]) for piece in range(4)]
    assert large == [PIECE_BYTES] * 3 + [28] and key_of(source, "large", 4) not in store.values
    assert key_of(source, "large", 1) == "weights/7/large#1" and key_of(source, "large") == "weights/7/large"
    folder = pull(source, CONFIG, "app", here)
    assert folder == slot_of(source, here)
    Verifier().verify(folder, source)
    found = load_file(folder / "model-00000.safetensors")
    assert found.keys() == TENSORS.keys() and all((found[name] == TENSORS[name]).all() for name in TENSORS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert store.joined == [(CONFIG, "app")] and store.opened == store.closed == 2 and not store.buffers


def test_a_client_gives_no_memory_and_uses_the_pool_s_devices(store, there):
    published(store, there)
    (setup,) = store.setups
    assert setup == ("10.0.0.2", "P2PHANDSHAKE", 0, 64 << 20, "rdma", "mlx5_0", "10.0.0.1:50051")


def test_weights_of_several_files_are_put_in_their_order(store, here, there, monkeypatch):
    source, folder = staged(there)
    (folder / "model-00001.safetensors").write_bytes((folder / "model-00000.safetensors").read_bytes())
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, form: reversed(sorted(glob(self, form))))
    put(source, folder, ENDPOINT)
    assert store.values[key_of(source, "")].decode().split("\n")[1:] == [
        "model-00000.safetensors",
        "model-00001.safetensors",
    ]


def test_weights_that_the_pool_has_are_not_put_again_and_those_of_a_broken_stage_go(store, there):
    source = published(store, there)
    before = dict(store.values)
    store.full = {"weights/"}
    put(source, slot_of(source, there), ENDPOINT)
    assert store.values == before
    store.full = set()
    other = published(store, there, tensors={"new": np.ones(3)})  # the same version, with other content
    assert set(store.values) == {f"weights/7/{name}" for name in ("", "new", "model-00000.safetensors")}
    assert store.values[key_of(other, "")].decode().startswith(other.digest)


def test_weights_of_another_version_stay_in_the_pool(store, there):
    first, second = published(store, there, 7), published(store, there, 77)
    assert key_of(first, "large") in store.values and key_of(second, "large") in store.values


def test_a_version_that_another_node_pulls_from_a_third_one_stays(store, here, there):
    former = published(store, here, 7)
    latter = published(store, there, 8)
    put(former, slot_of(former, here), ENDPOINT)
    assert key_of(former, "large") in store.values and key_of(latter, "large") in store.values


def test_the_pool_keeps_weights_of_versions_that_are_in_slots_alone(store, here, there):
    """Each update left a whole model in the pool, until no KV had room there."""
    published(store, here, 1)  # of a node that is gone
    sources = [published(store, there, version) for version in (4, 5, 55, 56)]
    assert sorted({int(key.split("/")[1]) for key in store.values}) == [55, 56]
    store.values["tailrace-0123456789abcdef@00"] = b"KV"
    assert pull(sources[-1], CONFIG, "app", here) == slot_of(sources[-1], here)
    put(sources[-2], slot_of(sources[-2], there), ENDPOINT)
    published(store, there, 57)
    assert sorted({key.split("/")[1] for key in store.values if "/" in key}) == ["56", "57"]
    assert store.values["tailrace-0123456789abcdef@00"] == b"KV"


@pytest.mark.parametrize("full", ["model-00000", "large#2", "weights/7/model.a"])
def test_weights_that_do_not_fit_are_refused_by_name_and_not_listed(store, there, full):
    source, folder = staged(there)
    store.full = {full}
    name = full.partition("#")[0].removeprefix("weights/7/")
    with pytest.raises(
        ValueError, match=rf"^weights {source}: {name}.* does not fit .*\(Mooncake says -10\); raise pool"
    ):
        put(source, folder, ENDPOINT)
    assert key_of(source, "") not in store.values and not store.buffers and store.closed == 1


def test_a_pool_that_takes_no_memory_says_so(store, here, there):
    source, folder = staged(there)
    store.refuses = True
    with pytest.raises(ValueError, match="the pool does not take their memory: Mooncake says -200"):
        put(source, folder, ENDPOINT)
    store.refuses = False
    put(source, folder, ENDPOINT)
    store.refuses = True
    with pytest.raises(ValueError, match="the pool does not take this node's memory: Mooncake says -200"):
        pull(source, CONFIG, "app", here)
    assert store.closed == 3 and slot_of(source, here) is None


def test_a_slot_that_is_here_is_not_pulled_and_an_older_one_makes_room(store, here, there):
    source, folder = staged(here)
    assert pull(source, CONFIG, "app", here) == folder and store.opened == 0
    newer = [published(store, there, version) for version in (8, 9)]
    for one in newer:
        pull(one, CONFIG, "app", here)
    assert sorted(version for version, _ in Slots("app-0", here).held()) == [8, 9]


@pytest.mark.parametrize("gone", ["large#2", "model-00000.safetensors", "model.a/b"])
def test_weights_that_are_lost_under_way_leave_no_slot(store, here, there, gone):
    source = published(store, there)
    store.lacks, store.keepers = {f"weights/7/{gone}"}, [Keeper(True)]
    with pytest.raises(ValueError, match=f"^weights {source}: .*is not in the pool any more; send them again"):
        pull(source, CONFIG, "app", here)
    slots = Slots("app-0", here)
    assert not slots.part.exists() and slots.held() == {} and not store.buffers and store.closed == 2
    store.lacks = set()
    assert pull(source, CONFIG, "app", here) == slot_of(source, here), "nothing of the first try is in the way"


@pytest.mark.parametrize("gone", ["large#2", "model-00000.safetensors", "model.a/b"])
def test_a_value_that_was_evicted_is_put_again_by_a_keeper(store, here, there, gone):
    """While the list of the weights remained, no keeper was asked: no load succeeded until a higher version."""
    source = published(store, there)
    del store.values[f"weights/7/{gone}"]

    def put_now() -> bool:
        put(source, slot_of(source, there), ENDPOINT)
        return True

    store.keepers = [Keeper(False), Keeper(put_now)]
    assert pull(source, CONFIG, "app", here) == slot_of(source, here)
    assert [len(keeper.asked) for keeper in store.keepers] == [1, 1] and f"weights/7/{gone}" in store.values


def test_a_copy_with_a_wrong_byte_is_no_slot_and_is_pulled_again(store, here, there):
    """It became a slot: every later load found it there, and failed."""
    source = published(store, there)
    key = key_of(source, "large")
    right = store.values[key]
    store.values[key] = bytes([right[0] ^ 1]) + right[1:]
    with pytest.raises(ValueError, match=f"^weights {source}: tensor large has another checksum than when it was"):
        pull(source, CONFIG, "app", here)
    slots = Slots("app-0", here)
    assert not slots.part.exists() and slots.held() == {}
    store.values[key] = right
    assert pull(source, CONFIG, "app", here) == slot_of(source, here)


def test_a_pulled_copy_is_read_once_by_the_replica_that_verifies_it(store, here, there, monkeypatch):
    source, verifier = published(store, there), Verifier()
    folder = pull(source, CONFIG, "app", here, verifier)
    monkeypatch.setattr(verified, "_checksums", None)
    verifier.verify(folder, source)


def test_a_part_that_is_gone_hides_no_reason(store, here, there):
    source = published(store, there)
    store.keepers = [Keeper(True)]
    get_into = store.get_into

    def lost(key, address, size):
        shutil.rmtree(Slots("app-0", here).part, ignore_errors=True)
        return -1 if "large" in key else get_into(key, address, size)

    store.get_into = lost
    with pytest.raises(ValueError, match="tensor large is not in the pool any more"):
        pull(source, CONFIG, "app", here)


def test_of_two_replicas_of_a_node_one_pulls_at_a_time(store, here, there):
    source = published(store, there)
    opened, folders = store.opened, []
    with (here / "tailrace-app-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pulling = threading.Thread(target=lambda: folders.append(pull(source, CONFIG, "app", here)))
        pulling.start()
        pulling.join(0.05)
        assert pulling.is_alive() and store.opened == opened, "another one holds the lock"
    pulling.join(60.0)
    assert folders == [slot_of(source, here)]


def test_a_node_whose_slots_another_process_never_leaves_is_refused(store, here, there, monkeypatch):
    """A pull waited for ever, and its thread with it."""
    source = published(store, there)
    monkeypatch.setattr(pool_copy, "PULL_S", 0.2)
    lock = Slots("app-0", here).lock()
    with pytest.raises(ValueError, match=rf"^weights {source}: another process has been writing to this node's slots"):
        pull(source, CONFIG, "app", here)
    os.close(lock)
    assert pull(source, CONFIG, "app", here) == slot_of(source, here)


def test_the_first_keeper_that_has_them_puts_them_and_no_other_is_asked(store, here, there):
    source, folder = staged(there)

    def put_now() -> bool:
        put(source, folder, ENDPOINT)
        return True

    store.keepers = [Keeper(RuntimeError("its node\nis gone")), Keeper(False), Keeper(put_now), Keeper(False)]
    assert pull(source, CONFIG, "app", here) == slot_of(source, here)
    assert [len(keeper.asked) for keeper in store.keepers] == [1, 1, 1, 0]
    assert store.keepers[2].asked == [(source, CONFIG)]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([], "no node has them in shared memory; send them again, or update from a folder"),
        ([False], "no node has them in shared memory"),
        ([RuntimeError("its node\nis gone"), False], "RuntimeError: is gone; send them again"),
        ([True], "the pool has lost them; send them again"),
    ],
)
def test_weights_that_no_node_has_are_refused(store, here, there, answers, words):
    source, _ = staged(there)
    store.keepers = [Keeper(answer) for answer in answers]
    with pytest.raises(ValueError, match=f"^weights {source}: {words}") as refused:
        pull(source, CONFIG, "app", here)
    assert "\n" not in str(refused.value) and store.closed == store.opened


def test_a_pool_that_cannot_be_reached_is_one_line(store, here, there):
    source, _ = staged(there)
    store.down = -5
    with pytest.raises(
        ValueError, match=r"cannot be pulled.*the pool's master at 10.0.0.1:50051 does not answer: .* -5"
    ):
        pull(source, CONFIG, "app", here)
    store.pool_down = True
    with pytest.raises(ValueError, match="they cannot be pulled from the pool: PoolDown: no master"):
        pull(source, CONFIG, "app", here)


def test_a_list_of_other_content_is_not_taken(store, here, there):
    source = published(store, there)
    other = MemorySource("app-0", 7, "0" * 16)
    with pytest.raises(ValueError, match="no node has them in shared memory"):
        pull(other, CONFIG, "app", here)
    assert pull(source, CONFIG, "app", here)
