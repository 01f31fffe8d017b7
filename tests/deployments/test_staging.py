"""Weights staged in memory: whole or not there, every byte checked, and the served slot is never touched."""

import os
import re
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

from tailrace.deployments.staging import safetensors_header, weights_memory
from tailrace.deployments.staging import stage as staging
from tailrace.deployments.staging.safetensors_header import HEADER_BYTES, header_block, read_header
from tailrace.deployments.staging.slots import (
    AlreadyStaging,
    MemorySource,
    Slots,
    is_memory,
    memory_source,
    service_name,
)
from tailrace.deployments.staging.stage import Stage, StageRefused, bytes_of
from tailrace.deployments.staging.verified import Verifier
from tailrace.deployments.staging.weights_memory import WeightsMemory

TENSORS = {
    "embed": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "odd": np.arange(5, dtype=np.int8),
    "after.odd": np.ones((4, 4), np.float32),
    "scalar": np.float32(3.0),
    "empty": np.zeros((0, 4), np.float32),
    "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
}
NOTHING = (0, "")


@pytest.fixture
def slots(tmp_path):
    return Slots("app-1", tmp_path)


def staged(slots, version=1, tensors=TENSORS, served=NOTHING) -> MemorySource:
    stage = Stage(slots, version, served, bytes_of(tensors))
    for name, tensor in tensors.items():
        stage.add(name, tensor)
    return stage.seal()


def read(folder) -> dict:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_staged_tensors_are_read_as_they_were(slots):
    source = staged(slots)
    folder = slots.held()[1, source.digest]
    found = read(folder)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == np.asarray(tensor).dtype and (found[name] == tensor).all()
    Verifier().verify(folder, source)
    assert memory_source(str(source)) == source
    assert not slots.part.exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_torch_tensors_of_any_type_and_layout_are_taken(slots):
    import torch
    from safetensors.torch import load_file as load_torch

    weights = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True)}
    source = staged(slots, tensors=weights)
    folder = slots.held()[1, source.digest]
    found = {name: value for path in folder.iterdir() for name, value in load_torch(path).items()}
    assert found["a"].equal(weights["a"]) and found["b"].equal(weights["b"].detach())


def test_the_digest_names_the_content_in_any_order_and_layout(slots):
    digest = staged(slots).digest
    assert staged(slots, 2, dict(reversed(TENSORS.items()))).digest == digest
    changed = TENSORS | {"odd": TENSORS["odd"] + 1}
    renamed = {("other" if name == "odd" else name): value for name, value in TENSORS.items()}
    reshaped = TENSORS | {"odd": TENSORS["odd"].reshape(1, 5)}
    others = {staged(slots, 3, tensors).digest for tensors in (changed, renamed, reshaped)}
    assert len(others | {digest}) == 4


def test_the_served_slot_is_kept_however_often_a_stage_fails(slots):
    served = staged(slots, 7)
    name = (7, served.digest)
    folder = slots.held()[name]
    for version in (8, 9, 9, 8):
        staged(slots, version, {"a": np.full(3, version, np.float32)}, name)
        assert slots.held()[name] == folder and len(slots.held()) == 2
        Verifier().verify(folder, served)


def test_of_two_unserved_slots_the_older_version_goes(slots):
    staged(slots, 1), staged(slots, 2)
    staged(slots, 3, served=(9, "a folder's"))
    assert sorted(version for version, _ in slots.held()) == [2, 3]


def test_a_broken_stage_leaves_a_part_that_the_next_one_removes(slots):
    served = staged(slots, 1)
    stage = Stage(slots, 2, (1, served.digest))
    stage.add("a", TENSORS["embed"])
    os.close(stage._lock)  # as the end of its process does
    stage._lock = -1
    assert slots.part.exists() and list(slots.held()) == [(1, served.digest)]
    source = staged(slots, 2, served=(1, served.digest))
    assert not slots.part.exists() and (2, source.digest) in slots.held()
    assert read(slots.held()[2, source.digest]).keys() == TENSORS.keys()


def test_a_writer_that_is_killed_lets_the_next_one_in(slots):
    code = (
        "import os, signal, sys, numpy\n"
        "from pathlib import Path\n"
        "from tailrace.deployments.staging.slots import Slots\n"
        "from tailrace.deployments.staging.stage import Stage\n"
        "stage = Stage(Slots('app-1', Path(sys.argv[1])), 1, (0, ''))\n"
        "stage.add('a', numpy.ones(1000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(slots.root)], check=False)
    assert ended.returncode == -9 and slots.part.exists() and slots.held() == {}
    assert staged(slots).version == 1


def test_a_second_writer_is_refused_until_the_first_has_ended(slots):
    first = Stage(slots, 1, NOTHING)
    with pytest.raises(
        AlreadyStaging, match=r"^weights of app-1 are being staged on this node already; commit or drop them$"
    ):
        Stage(slots, 2, NOTHING)
    first.drop()
    assert not slots.part.exists()
    staged(slots, 2)


def test_a_sealed_slot_is_not_taken_while_replicas_check_it(slots):
    """The next stage deleted the slot of a version that was being committed: only the version before was served."""
    served = staged(slots, 5)
    stage = Stage(slots, 6, (5, served.digest))
    stage.add("a", TENSORS["embed"])
    source = stage.seal()
    with pytest.raises(AlreadyStaging):
        Stage(slots, 7, (5, served.digest))
    assert (6, source.digest) in slots.held()
    stage.drop()
    assert (6, source.digest) in slots.held() and not slots.part.exists()
    Stage(slots, 7, (6, source.digest)).drop()
    assert list(slots.held()) == [(6, source.digest)]


def test_a_forgotten_stage_lets_the_next_one_in(slots):
    stage = Stage(slots, 1, NOTHING)
    stage.add("a", TENSORS["embed"])
    del stage
    staged(slots, 2)


def test_a_dropped_stage_does_not_touch_a_later_one(slots):
    first = Stage(slots, 1, NOTHING)
    first.drop()
    second = Stage(slots, 2, NOTHING)
    first.drop()
    second.add("a", TENSORS["embed"])
    assert second.seal().version == 2


@pytest.mark.parametrize(
    ("add", "words"),
    [
        ([("a", TENSORS["embed"])] * 2, "tensor a comes twice"),
        ([("a", np.array(["text"]))], "tensor a is a ndarray of <U4"),
        ([("a", [1.0])], "tensor a is a list of no type"),
        ([], "no tensor was given"),
    ],
)
def test_what_cannot_be_staged_is_refused_by_name(slots, add, words):
    stage = Stage(slots, 1, NOTHING)
    with pytest.raises(StageRefused, match=words) as refused:
        for name, tensor in add:
            stage.add(name, tensor)
        stage.seal()
    assert "\n" not in str(refused.value)
    stage.drop()


def test_too_little_memory_is_one_line_before_a_tensor_is_copied(slots, monkeypatch):
    served = staged(slots, 1)
    usage = staging.shutil.disk_usage(slots.root)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StageRefused, match=r"1,048,876 bytes are needed, and .* has 1,000 free; give the machine more"):
        Stage(slots, 2, (1, served.digest), 300)
    assert (1, served.digest) in slots.held()
    Stage(slots, 2, (1, served.digest)).drop()  # the lock is free again


def test_memory_that_ends_under_way_is_one_line_with_the_tensor(slots, monkeypatch):
    stage = Stage(slots, 2, NOTHING)
    stage.add("first", TENSORS["embed"])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging.os, "posix_fallocate", full)
    with pytest.raises(StageRefused, match=r"weights 2: second needs 96 bytes after 96, and .* free; give the machine"):
        stage.add("second", TENSORS["embed"])
    stage.drop()


def test_tensors_share_a_file_where_their_items_may_begin(slots):
    tensors = {"odd": np.ones(5, np.int8), "bytes": np.ones(3, np.int8), "none": np.ones((0, 3), np.int64)}
    source = staged(slots, tensors=tensors)
    assert len(list(slots.held()[1, source.digest].iterdir())) == 1
    source = staged(slots, 2, tensors={"odd": np.ones(5, np.int8), "four": np.ones(1, np.float32)})
    assert len(list(slots.held()[2, source.digest].iterdir())) == 2, "four bytes begin at a multiple of four"


def test_the_bytes_of_tensors_are_known_unless_they_come_once_or_have_none():
    pairs = [("a", np.ones(3, np.float32)), ("b", np.ones(5, np.int8))]
    assert bytes_of(dict(pairs)) == bytes_of(pairs) == 17 and bytes_of({}) == 0
    assert bytes_of(iter(pairs)) is None and bytes_of({"a": [1.0]}) is None and bytes_of(["a"]) is None


def test_a_stage_whose_service_has_ended_is_dropped_without_an_error(slots):
    stage = Stage(slots, 1, NOTHING)
    stage.add("a", TENSORS["embed"])
    slots.remove()
    stage.drop()
    assert list(slots.root.iterdir()) == []


def test_many_tensors_take_several_files(slots):
    count = HEADER_BYTES // 100
    tensors = {f"model.layers.{i}.weight": np.full(1, i, np.float32) for i in range(count)}
    source = staged(slots, tensors=tensors)
    folder = slots.held()[1, source.digest]
    assert len(list(folder.iterdir())) > 1
    assert read(folder).keys() == tensors.keys()


def test_tensors_of_many_dimensions_fit_into_the_headers(slots):
    tensors = {f"t{number}": np.full((1,) * 30, number, np.int32) for number in range(HEADER_BYTES // 700)}
    source = staged(slots, tensors=tensors)
    folder = slots.held()[1, source.digest]
    assert len(list(folder.iterdir())) == 2 and read(folder).keys() == tensors.keys()
    with pytest.raises(ValueError, match=f"a header of .* bytes, for which {HEADER_BYTES - 8} are left"):
        header_block({"name": "x" * HEADER_BYTES})


def test_a_copy_that_the_system_takes_in_parts_is_whole(slots, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(
        staging.os, "pwrite", lambda file, data, at: pwrite(file, data[:7], at) if at else pwrite(file, data, at)
    )
    source = staged(slots)
    folder = slots.held()[1, source.digest]
    monkeypatch.undo()
    Verifier().verify(folder, source)
    assert (read(folder)["embed"] == TENSORS["embed"]).all()


def test_a_header_may_have_the_format_s_own_limit_and_no_more(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes((10).to_bytes(8, "little") + b"{}        ")
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 10)
    assert read_header(path) == ({}, 18)
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 9)
    with pytest.raises(ValueError, match="has no header"):
        read_header(path)


def test_a_source_in_memory_is_text_with_its_prefix():
    assert is_memory("memory:app-1/7/0123456789abcdef") and not is_memory("/folder/memory:") and not is_memory(None)


@pytest.mark.parametrize("here", [True, False])
def test_weights_are_fetched_from_the_pool_where_the_node_lacks_them_and_verified_always(monkeypatch, tmp_path, here):
    source, pulled, seen = MemorySource("app-1", 7, "0" * 16), [], []
    pool_copy = ModuleType("tailrace.deployments.staging.pool_copy")
    pool_copy.pull = lambda *given, verifier: pulled.append(given) or tmp_path / "pulled"
    monkeypatch.setattr(WeightsMemory, "own_slots", lambda self: pulled.append("they end with the application"))
    monkeypatch.setitem(sys.modules, pool_copy.__name__, pool_copy)
    monkeypatch.setattr(weights_memory, "slot_of", lambda source: tmp_path / "slot" if here else None)
    monkeypatch.setattr(weights_memory.Verifier, "verify", lambda self, *given: seen.append(given))
    WeightsMemory("the pool", "app").fetch(source)
    assert pulled == ([] if here else ["they end with the application", (source, "the pool", "app")])
    assert seen == [(tmp_path / ("slot" if here else "pulled"), source)]
    alone = WeightsMemory(None, "app")
    if here:
        alone.fetch(source)
        assert len(seen) == 2
        return
    with pytest.raises(ValueError, match="no slot of this node holds them, and there is no pool to pull from"):
        alone.fetch(source)


def flip(path):
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 3] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def swap(path):
    """Two tensors of one shape change places in the header: every byte is one that was written."""
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"first":', b'"other":', 1).replace(b'"secnd":', b'"first":', 1))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (flip, "tensor first has another checksum than when it was staged"),
        (cut, "ends before tensor secnd"),
        (swap, "blake3:other"),
        (lambda path: path.unlink(), "its tensors are not those that were staged"),
        (lambda path: path.write_bytes(b"\0" * 100), "model-00000.safetensors has no header"),
    ],
)
def test_a_slot_that_is_not_as_it_was_staged_is_refused_in_one_line(slots, spoil, words):
    source = staged(slots, tensors={"first": np.arange(4, dtype=np.float32), "secnd": np.ones(4, np.float32)})
    folder = slots.held()[1, source.digest]
    spoil(folder / "model-00000.safetensors")
    with pytest.raises(ValueError, match=f"^weights {re.escape(str(source))}: .*{words}") as refused:
        Verifier().verify(folder, source)
    assert "\n" not in str(refused.value)


def test_a_verified_slot_is_read_once_and_a_changed_one_again(slots):
    source, verifier = staged(slots), Verifier()
    folder = slots.held()[1, source.digest]
    verifier.verify(folder, source)
    flip(folder / "model-00000.safetensors")
    with pytest.raises(ValueError, match="another checksum"):
        verifier.verify(folder, source)


@pytest.mark.parametrize("text", ["memory:", "memory:app/1", "memory:a/../1/0123456789abcdef", "memory:a/1/xyz"])
def test_a_name_that_no_stage_has_made_is_refused(text):
    with pytest.raises(ValueError, match=r"^weights memory:.*not a name that `send_weights` makes"):
        memory_source(text)


def test_services_of_one_name_on_two_clusters_have_slots_of_their_own():
    names = {service_name("app", "127.0.0.1:1"), service_name("app", "127.0.0.1:2"), service_name("a/../b", "x")}
    assert len(names) == 3 and all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)


def test_nothing_is_left_after_the_service(slots):
    staged(slots)
    Stage(slots, 2, NOTHING)
    slots.remove()
    assert list(slots.root.iterdir()) == []


def test_the_header_is_read_without_the_data(slots):
    source = staged(slots)
    header, begin = read_header(next(slots.held()[1, source.digest].iterdir()))
    assert begin == HEADER_BYTES and header["__metadata__"]["digest"] == source.digest
