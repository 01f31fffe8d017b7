"""Adapters apart from vLLM: their digests, their book, the chunks that wait for a slot, and the keys that know them."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from tailrace.deployments.batches.adapter_book import AdapterBook
from tailrace.deployments.batches.prompts import Prepared
from tailrace.deployments.batches.records import GroupRecord, SampleRecord
from tailrace.deployments.engine.adapters import Adapters
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.errors import AdapterRefused
from tailrace.deployments.messages.logged_tokens import FRAME, LoggedTokens, packed, unpacked
from tailrace.deployments.messages.rollout import PromptGroup, Rejected, RejectedBy, Segment
from tailrace.deployments.staging.adapter_folder import adapter_digest, misfit
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import engine_arguments
from tailrace.kvpool.keys import cache_salt
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import EndSample, SampleEnd, StartChunk


def write(folder, tensors: bytes = b"tensors", config: dict | None = None) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4} | (config or {})))
    (folder / "adapter_model.safetensors").write_bytes(tensors)
    return str(folder)


def test_a_digest_names_every_byte_of_both_files_and_no_path(tmp_path):
    one = adapter_digest(write(tmp_path / "one"))
    assert adapter_digest(write(tmp_path / "same")) == one
    assert len(one) == 16
    assert adapter_digest(write(tmp_path / "two", tensors=b"tensorz")) != one
    assert adapter_digest(write(tmp_path / "three", config={"lora_alpha": 8})) != one


@pytest.mark.parametrize(("path", "reason"), [("poet", "give an absolute path"), ("/no/poet", "No such file")])
def test_a_folder_without_an_adapter_is_refused_in_one_line(path, reason):
    with pytest.raises(AdapterRefused, match=reason) as refusal:
        adapter_digest(path)
    assert "\n" not in str(refusal.value)


def safetensors(**shapes) -> bytes:
    header = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    return len(header).to_bytes(8, "little") + header.encode()


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("base_model.model.layer.lora_A.weight", [4, 10], None),
        ("base_model.model.layer.lora_B.weight", [20, 4], None),
        ("base_model.model.layer.lora_A.weight", [4, 20], "for a weight of [20, 10]"),
        ("base_model.model.layer.lora_B.weight", [10, 4], "for a weight of [20, 10]"),
        ("base_model.model.other.lora_A.weight", [4, 5], None),
        ("base_model.model.layer.weight", [20, 10], "is no tensor of LoRA"),
    ],
)
def test_tensors_that_do_not_fit_the_weights_are_named(tmp_path, name, shape, reason):
    found = misfit(write(tmp_path / "a", safetensors(**{name: shape})), {"layer.weight": (20, 10)})
    assert found is None if reason is None else reason in found and name in found


def test_the_end_of_one_file_and_the_beginning_of_the_next_are_two_contents(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, (config, tensors) in zip(folders, ((b"ab", b"c"), (b"a", b"bc")), strict=True):
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(config)
        (folder / "adapter_model.safetensors").write_bytes(tensors)
    assert adapter_digest(str(folders[0])) != adapter_digest(str(folders[1]))


def test_every_tensor_is_looked_at_though_others_are_unknown(tmp_path):
    content = {
        "__metadata__": {"format": "pt"},
        "base_model.model.other.lora_A.weight": {"dtype": "F32", "shape": [4, 5], "data_offsets": [0, 0]},
        "base_model.model.layer.lora_A.weight": {"dtype": "F32", "shape": [4, 20], "data_offsets": [0, 0]},
    }
    header = json.dumps(content).encode()
    folder = write(tmp_path / "a", len(header).to_bytes(8, "little") + header)
    assert "layer.lora_A.weight is [4, 20]" in misfit(folder, {"layer.weight": (20, 10)})
    assert misfit(folder, {"layer.weight": (20, 20)}) is None


@pytest.mark.parametrize("entry", [{"shape": [4]}, {"shape": []}, {}, [], None])
def test_a_tensor_of_another_form_is_named_and_raises_in_no_rank(tmp_path, entry):
    """Of several ranks, vLLM reads the answers up to the first that raises, and gives the others to the next call."""
    header = json.dumps({"base_model.model.layer.lora_A.weight": entry}).encode()
    folder = write(tmp_path / "a", len(header).to_bytes(8, "little") + header)
    assert misfit(folder, {"layer.weight": (20, 10)}).startswith(f"adapter folder {folder}: not in PEFT's form: ")


def test_a_file_that_is_cut_is_no_adapter(tmp_path):
    assert "not in PEFT's form" in misfit(write(tmp_path / "a", b"\1"), {})


# ---- the engine's adapters ---------------------------------------------------------------------------


class Engine:
    """Keeps the calls to its workers. `bad`: folders that they cannot load."""

    def __init__(self, max_loras: int, max_cpu_loras: int):
        self.vllm_config = SimpleNamespace(
            lora_config=SimpleNamespace(max_loras=max_loras, max_cpu_loras=max_cpu_loras) if max_loras else None
        )
        self.held: dict[int, str] = {}
        self.loads: Counter[str] = Counter()
        self.bad: set[str] = set()

    def collective_rpc(self, method: str, args: tuple):
        if method == "drop_adapter":
            self.held.pop(args[0], None)
            return [None]
        number, folder = args
        self.held[number] = folder
        self.loads[folder] += 1
        return [None, "a rank cannot load it" if folder in self.bad else None]


@pytest.fixture
def made(tmp_path):
    """Adapters by one letter."""

    def make(name: str) -> Adapter:
        path = write(tmp_path / name, tensors=name.encode())
        return Adapter(name, 1, adapter_digest(path), path)

    return make


def chunk(adapter: Adapter | None, number: int = 0) -> ChunkRequest:
    name = adapter.name if adapter else "plain"
    return ChunkRequest(
        chunk_id=f"{name}{number}",
        sample_key=0,
        token_ids=np.ones(2, np.int32),
        prompt_tokens=2,
        max_tokens=4,
        sampling=None,
        weights_version=0,
        adapter=adapter,
    )


def test_chunks_wait_in_their_order_for_a_slot(made):
    adapters = Adapters(Engine(2, 4))
    a, b, c = map(made, "abc")
    for one in (a, b):
        assert adapters.admits(chunk(one))
        adapters.take(chunk(one))
    assert not adapters.admits(chunk(c))
    adapters.wait(chunk(c), 1.0)
    assert not adapters.admits(chunk(a, 1)), "else those of running adapters would pass it for ever"
    adapters.wait(chunk(a, 1), 2.0)
    assert adapters.admits(chunk(None)), "a slot is none of its business"
    assert list(adapters.admitted()) == [] and adapters.waiting() == ["c0", "a1"]
    adapters.free(chunk(a))
    ready = []
    for one, submitted_s in adapters.admitted():
        adapters.take(one)
        ready.append((one.chunk_id, submitted_s))
    assert ready == [("c0", 1.0)], "b and c have the slots now"
    adapters.free(chunk(b))
    assert [one.chunk_id for one, _ in adapters.admitted()] == ["a1"]


def test_the_longest_unused_adapter_makes_room_and_one_in_use_stays(made):
    engine = Engine(1, 2)
    adapters = Adapters(engine)
    a, b, c = map(made, "abc")
    adapters.take(chunk(a))
    adapters.load(b.path)
    adapters.load(c.path)
    assert sorted(engine.held.values()) == sorted([a.path, c.path])
    adapters.free(chunk(a))
    adapters.load(c.path)
    adapters.load(b.path)
    assert sorted(engine.held.values()) == sorted([b.path, c.path])
    adapters.take(chunk(c))
    assert engine.loads[c.path] == 1, "it was loaded already"


def test_another_content_in_the_folder_is_refused_and_nothing_is_held(made, tmp_path):
    engine = Engine(1, 2)
    adapters, a = Adapters(engine), made("a")
    write(tmp_path / "a", tensors=b"another")
    with pytest.raises(AdapterRefused, match=r"adapter 'a', version 1: .* holds another content by now"):
        adapters.take(chunk(a))
    assert not engine.held and adapters.admits(chunk(made("b")))


def test_a_loaded_content_outlives_its_folder(made, tmp_path):
    adapters, a = Adapters(Engine(1, 2)), made("a")
    adapters.take(chunk(a))
    adapters.free(chunk(a))
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    adapters.take(chunk(a))


def test_an_engine_that_sleeps_loads_an_adapter_with_the_first_chunk_that_has_it(made):
    """On a GPU the memory of its layers is given back with that of the weights: the load ended the engine."""
    engine, sleeps = Engine(1, 2), [True]
    adapters, a = Adapters(engine, lambda: sleeps[0]), made("a")
    assert adapters.load(a.path) == a.digest and not engine.held
    with pytest.raises(AdapterRefused, match="give an absolute path"):
        adapters.load("a")
    sleeps[0] = False
    adapters.take(chunk(a))
    assert list(engine.held.values()) == [a.path] and engine.loads[a.path] == 1


def test_a_rank_that_cannot_load_refuses_for_all(made):
    engine, a = Engine(1, 2), made("a")
    engine.bad.add(a.path)
    with pytest.raises(AdapterRefused, match="a rank cannot load it"):
        Adapters(engine).load(a.path)
    assert not engine.held


def test_an_engine_without_adapters_says_how_to_have_them(made):
    adapters, a = Adapters(Engine(0, 0)), made("a")
    assert adapters.admits(chunk(a))
    with pytest.raises(AdapterRefused, match="enable_lora: true"):
        adapters.take(chunk(a))
    adapters.take(chunk(None))


def test_a_forgotten_name_gives_its_content_back_once_no_chunk_runs_with_it(made):
    engine = Engine(2, 4)
    adapters, a, b = Adapters(engine), made("a"), made("b")
    for one in (a, b):
        adapters.take(chunk(one))
    adapters.free(chunk(b))
    adapters.forget("a")
    adapters.forget("b")
    assert list(engine.held.values()) == [a.path] and adapters.known() == ()


def test_more_adapters_are_kept_than_run():
    def kept(**given) -> int:
        return engine_arguments(EngineConfig(model="m", vllm_args={"enable_lora": True} | given))["max_cpu_loras"]

    assert kept() > 1 and kept(max_loras=8) == 9
    assert kept(max_loras=2, max_cpu_loras=2) == 3 and kept(max_loras=2, max_cpu_loras=7) == 7
    assert "max_cpu_loras" not in engine_arguments(EngineConfig(model="m"))


# ---- the coordinator's book --------------------------------------------------------------------------


def prepared(adapter: str | None) -> Prepared:
    return Prepared(PromptGroup(prompt_id="p", token_ids=(1,), adapter=adapter), (1,), 8, "key")


def test_a_name_has_a_version_for_each_content_in_a_row():
    book = AdapterBook()
    versions = [book.take("poet", digest, "/p").version for digest in ("x", "x", "y", "x")]
    book.drop("poet")
    assert [*versions, book.take("poet", "x", "/p").version] == [1, 1, 2, 3, 4]


def test_prompts_are_bound_to_the_present_content():
    book = AdapterBook()
    assert book.bound(prepared(None), {}) == prepared(None)
    refused = book.bound(prepared("poet"), {})
    assert isinstance(refused, Rejected) and refused.by is RejectedBy.ADAPTER and "loaded: none" in refused.reason
    first = book.take("poet", "x", "/x")
    bound = book.bound(prepared("poet"), {"poet": 1})
    book.take("poet", "y", "/y")
    assert bound.adapter == first and book.bound(prepared("poet"), {}).adapter.digest == "y"


def test_a_new_coordinator_takes_the_highest_version_of_each_name():
    book = AdapterBook()
    book.adopt([Adapter("poet", 2, "y", "/y"), Adapter("poet", 1, "x", "/x"), Adapter("clerk", 5, "z", "/z")])
    assert [(one.name, one.digest) for one in book.all()] == [("clerk", "z"), ("poet", "y")]
    assert book.take("poet", "w", "/w").version == 3


def test_a_content_that_a_new_coordinator_has_named_is_newer_than_all_that_it_then_hears_of():
    book = AdapterBook()
    book.take("poet", "new", "/new")
    found = [Adapter("poet", 3, "old", "/old"), Adapter("poet", 2, "older", "/older"), Adapter("clerk", 5, "z", "/z")]
    assert book.adopt(found) == [Adapter("poet", 4, "new", "/new")]
    assert [(one.name, one.version, one.digest) for one in book.all()] == [("clerk", 5, "z"), ("poet", 4, "new")]


def test_a_batch_that_wants_a_later_version_than_is_known_is_refused():
    book = AdapterBook()
    book.take("poet", "x", "/x")
    refused = book.bound(prepared("poet"), {"poet": 2})
    assert isinstance(refused, Rejected) and refused.by is RejectedBy.ADAPTER and "version 1" in refused.reason


def test_tokens_of_two_contents_are_two_segments():
    group = GroupRecord("b", 0, PromptGroup(prompt_id="p", token_ids=(1,)), np.ones(1, np.int32), "key")
    sample, part = SampleRecord(group, 0, 0, None), unpacked(logged("x")).part()
    sample.append(0, part, "r", "w", "x")
    sample.append(2, part, "r", "w", "x")
    sample.append(4, part, "r", "w", "y")
    assert [(one.start, one.end, one.adapter_digest) for one in sample.segments] == [(0, 4, "x"), (4, 6, "y")]
    assert sample.updates(sample.segments[0].weights_version) == 0
    assert sample.updates(sample.segments[0].weights_version + 2) == 2 * 6, "of six tokens, two versions each"


def logged(adapter: str) -> bytes:
    segment = Segment(weights_version=3, weights_digest="w", adapter_digest=adapter, replica_id="r1", start=0, end=2)
    columns = np.arange(2, dtype=np.int32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    return packed(LoggedTokens(b"0" * 16, 1, segment, False, *columns))[FRAME.size :]


def test_logged_tokens_know_their_adapter():
    for adapter in ("", "0123456789abcdef"):
        segment = unpacked(logged(adapter)).segment
        assert (segment.weights_digest, segment.adapter_digest, segment.replica_id) == ("w", adapter, "r1")


def test_keys_of_kv_know_the_adapter():
    salts = {cache_salt(1, "w", adapter) for adapter in ("", "x", "y")}
    assert len(salts) == 3 and cache_salt(1, "w") in salts


def test_a_sample_that_no_replica_can_run_ends_at_once_and_blames_no_replica():
    core = RolloutCore(Policies(), 0)
    core.observe(ev.ReplicaJoined(0.0, "r", 100, 16, 8, 0, 0))
    groups = tuple(ev.GroupSpec(f"b/g{number}", 4, 1, 32) for number in range(6))
    core.observe(ev.SamplesSubmitted(0.0, "b", groups))
    starts = [action for action in core.decide(ev.Tick(0.0)) if isinstance(action, StartChunk)]
    for start in starts[:5]:
        core.observe(ev.ChunkFailed(1.0, start.chunk_id, "its adapter is gone", of_sample=True))
    ends = [action for action in core.decide(ev.Tick(1.0)) if isinstance(action, EndSample)]
    assert [(one.end, one.error) for one in ends] == [(SampleEnd.FAILED, "its adapter is gone")] * 5
    assert core.replicas.aside("r") == ""
    core.observe(ev.ChunkFailed(2.0, starts[5].chunk_id, "chance"))
    assert not [action for action in core.decide(ev.Tick(2.0)) if isinstance(action, EndSample)]


def test_a_report_is_as_its_replica_knows_names():
    adapters = Adapters(Engine(1, 2))
    first = Adapter("poet", 1, "x", "/x")
    adapters.name(first)
    adapters.name(replace_version(first, 3))
    adapters.name(replace_version(first, 2))
    assert adapters.known() == (replace_version(first, 3),)


def replace_version(adapter: Adapter, version: int) -> Adapter:
    return adapter._replace(version=version)
