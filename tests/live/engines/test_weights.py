"""Weights changed in place: the running engine then speaks exactly as one that was started on them.

One engine alive at a time: first one started on the other weights, for what is expected; then the one that changes.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from engine_answers import ANSWER_S, held
from safetensors import safe_open
from safetensors.numpy import save_file
from test_engine import SAMPLES, TOKENS, arrays, assert_same, chunk, run
from tiny_models import save_tiny

import tailrace
from tailrace.app.model import perturbed
from tailrace.deployments.coordinator.weight_scores import WeightScores
from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import KV_CACHE, TAGS
from tailrace.deployments.messages.command import FallAsleep, LoadWeights, ReadWeights, ResetCache, WakeKv
from tailrace.deployments.messages.errors import EngineDown
from tailrace.deployments.messages.scores import SCORED, TOLERANCE, apart
from tailrace.deployments.staging.held import checksum_of
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.weight_loading import weights_digest
from tailrace.policies.protocol.events import ChunkEnd

pytestmark = pytest.mark.live


def whole(engine, version):
    """Every sample from its prompt to its end, all at once."""
    return run(engine, *(chunk(sample, weights_version=version) for sample in SAMPLES))


def assert_all_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one.weights_version == other.weights_version
        assert_same(arrays(one), other)


@pytest.fixture(scope="module")
def wide_model(model_dir, tmp_path_factory):
    """The tiny model with all tokens of the demo model: it is seen whether its 25 MiB are in memory."""
    return save_tiny(model_dir, tmp_path_factory.mktemp("wide") / "model", 49152)


@pytest.fixture(scope="module")
def other_wide_weights(wide_model, tmp_path_factory):
    """The wide model's folder with other weights."""
    return perturbed(wide_model, tmp_path_factory.mktemp("weights") / "other", scale=0.05)


@pytest.fixture(scope="module")
def new(other_wide_weights):
    """What an engine says that was started on the other weights."""
    engine = EngineRunner(EngineConfig(model=str(other_wide_weights), max_model_len=256, kv_cache_gib=0.25), "new", 1)
    results = whole(engine, 1)
    engine.stop()
    return results


@pytest.fixture(scope="module")
def running(wide_model, new):
    engine = EngineRunner(EngineConfig(model=str(wide_model), max_model_len=256, kv_cache_gib=0.25), "running")
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def old(running):
    """What the running engine says before anything is changed."""
    return whole(running, 0)


@pytest.fixture
def engine(running, old, wide_model):
    """The running engine, under version 0."""
    if running.stats().weights_version != 0:
        running.ask(LoadWeights(0, str(wide_model))).result(timeout=120)
    return running


def test_loaded_weights_speak_as_in_an_engine_started_on_them(engine, old, new, wide_model, other_wide_weights):
    assert any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(old, new, strict=True))
    engine.ask(LoadWeights(1, str(other_wide_weights))).result(timeout=120)
    assert (engine.stats().weights_version, engine.stats().weights_source) == (1, str(other_wide_weights))
    digest = weights_digest(str(other_wide_weights))
    assert engine.stats().weights_digest == digest
    assert_all_same(whole(engine, 1), new)
    (named, misnamed) = run(
        engine, chunk(0, weights_version=1, weights_digest=digest), chunk(1, weights_version=1, weights_digest="0" * 16)
    )
    assert named.weights_version == 1
    assert isinstance(misnamed, ValueError) and f"wants weights {'0' * 16}, this is {digest}" in str(misnamed)
    with pytest.raises(ValueError, match=f"holds other weights \\({digest}\\) than version 2 \\({'0' * 16}\\)"):
        engine.ask(LoadWeights(2, str(other_wide_weights), "0" * 16)).result(timeout=60)
    (refused,) = run(engine, chunk(0))
    assert isinstance(refused, ValueError) and "wants weights version 0, this is 1" in str(refused)
    engine.ask(LoadWeights(0, str(wide_model))).result(timeout=120)
    assert engine.ask(ResetCache()).result(timeout=60)
    assert_all_same(whole(engine, 0), old)


def nothing(folder, wide_model):
    pass


def no_safetensors(folder, wide_model):
    folder.mkdir()
    shutil.copy(wide_model / "config.json", folder)


def other_shapes(folder, wide_model):
    folder.mkdir()
    with safe_open(wide_model / "model.safetensors", framework="np") as file:
        save_file({name: np.zeros(1, np.float32) for name in file.keys()}, folder / "model.safetensors")  # noqa: SIM118


BAD = {
    nothing: "no such folder",
    no_safetensors: r"no \*\.safetensors",
    other_shapes: r"model\.embed_tokens\.weight is float \(1,\), in the running model float \(49152, 128\)",
}


@pytest.mark.parametrize("make", BAD)
def test_bad_weights_are_refused_and_the_old_ones_go_on(engine, old, wide_model, tmp_path, make):
    make(tmp_path / "bad", wide_model)
    before = engine.stats()
    with pytest.raises(ValueError, match=f"^weights folder {tmp_path / 'bad'}: .*{BAD[make]}") as refused:
        engine.ask(LoadWeights(1, str(tmp_path / "bad"))).result(timeout=60)
    assert "\n" not in str(refused.value) and engine.healthy
    assert (engine.stats().weights_version, engine.stats().weights_source) == (0, before.weights_source)
    assert engine.ask(ResetCache()).result(timeout=60)
    assert_all_same(run(engine, chunk(0), chunk(1)), old[:2])


def test_chunks_in_flight_end_under_their_own_version_and_early_ones_under_theirs(engine, old, new, other_wide_weights):
    log = Queue()  # what ended, in order
    with held(engine, lambda: max(engine._stepper.stats().running.values(), default=0) >= 4) as waits:
        for sample in SAMPLES:
            engine.submit(chunk(sample), lambda result: log.put(("old", result)))
        assert waits.wait(ANSWER_S)
        loaded = engine.ask(LoadWeights(1, str(other_wide_weights)))
        loaded.add_done_callback(lambda done: log.put(("loaded", done)))
        for sample in SAMPLES:
            engine.submit(chunk(sample, weights_version=1), lambda result: log.put(("new", result)))
        engine.submit(chunk(0, chunk_id="aborted", weights_version=1), lambda result: log.put(("aborted", result)))
        engine.abort("aborted")
        engine.submit(chunk(0, chunk_id="late"), lambda result: log.put(("late", result)))
    ended = [log.get(timeout=ANSWER_S) for _ in range(len(SAMPLES) * 2 + 3)]
    names = [name for name, _ in ended]
    assert set(names[: len(SAMPLES)]) == {"old"} and names[len(SAMPLES)] == "loaded" and loaded.result() is None
    for name, expected in (("old", old), ("new", new)):
        results = [result for kind, result in ended if kind == name]
        assert_all_same(sorted(results, key=lambda result: result.chunk_id), expected)
    (aborted,) = [result for name, result in ended if name == "aborted"]
    assert aborted.end is ChunkEnd.ABORTED and not aborted.token_ids.size
    (late,) = [result for name, result in ended if name == "late"]
    assert isinstance(late, ValueError) and "wants weights version 0, this is 1" in str(late)


def test_early_chunks_of_weights_that_are_refused_are_refused(engine, old, tmp_path):
    boxes = Queue(), Queue()
    engine.submit(chunk(0), boxes[0].put)
    loaded = engine.ask(LoadWeights(1, str(tmp_path / "nowhere")))
    engine.submit(chunk(1, weights_version=1), boxes[1].put)
    assert_same(arrays(boxes[0].get(timeout=60)), old[0])
    assert "no such folder" in str(loaded.exception(timeout=60))
    assert "wants weights version 1, this is 0" in str(boxes[1].get(timeout=60))


def resident_mib() -> float:
    """Of this process's own memory; files that are mapped do not count."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Anonymous:\s+(\d+)", text)[1]) / 1024


def test_an_engine_that_sleeps_gives_its_memory_back_and_continues_with_the_same_tokens(engine, old, wide_model):
    digest, half = engine.stats().weights_digest, TOKENS // 2
    begun = run(engine, *(chunk(sample, max_tokens=half) for sample in SAMPLES))
    awake, box = resident_mib(), Queue()
    engine.submit(chunk(0, chunk_id="in flight"), box.put)
    engine.ask(FallAsleep()).result(timeout=60)
    assert_same(arrays(box.get_nowait()), old[0])
    assert engine.stats().asleep == TAGS and engine.stats().weights_digest == digest
    assert resident_mib() < awake - 265, "its weights have 25 MiB, and its KV 256"
    (refused,) = run(engine, chunk(0))
    assert isinstance(refused, ValueError) and "this engine sleeps" in str(refused)
    assert "wake it up" in str(engine.ask(ReadWeights()).exception(timeout=60))
    with pytest.raises(ValueError, match="holds other weights"):
        engine.ask(LoadWeights(0, "", "0" * 16)).result(timeout=60)
    engine.ask(LoadWeights(0, "", digest)).result(timeout=120)
    assert engine.stats().asleep == (KV_CACHE,)
    engine.ask(WakeKv()).result(timeout=60)
    assert engine.stats().asleep == ()
    rest = run(engine, *(chunk(n, begun[n].token_ids, TOKENS - half, chunk_id=f"rest {n}") for n in SAMPLES))
    for whole_one, first, second in zip(old, begun, rest, strict=True):
        if first.end is not ChunkEnd.STOP:
            tokens = np.concatenate([first.token_ids, second.token_ids])
            np.testing.assert_array_equal(tokens, whole_one.token_ids)
    assert_all_same(whole(engine, 0), old)


def test_an_engine_does_not_sleep_if_its_weights_could_not_come_back(engine, old, other_wide_weights, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(other_wide_weights, folder)
    engine.ask(LoadWeights(1, str(folder))).result(timeout=120)
    shutil.rmtree(folder)
    assert "could not come back" in str(engine.ask(FallAsleep()).exception(timeout=60))
    (went_on,) = run(engine, chunk(0, weights_version=1))
    assert len(went_on.token_ids) and engine.stats().asleep == () and engine.healthy


def test_weights_read_back_are_those_of_the_folder_and_a_changed_one_is_named(
    engine, old, wide_model, other_wide_weights
):
    found = engine.ask(ReadWeights()).result(timeout=120)
    assert (found.version, found.unlike, found.problem) == (0, (), "")
    with safe_open(wide_model / "model.safetensors", framework="pt") as file:
        saved = {name: checksum_of(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a dict
    assert found.checksums == saved
    engine.ask(LoadWeights(1, str(other_wide_weights))).result(timeout=120)
    assert engine.ask(ReadWeights()).result(timeout=120).unlike == ()
    vllm = engine._stepper._engine.engine_core.engine_core
    model = vllm.model_executor.driver_worker.worker.model_runner.get_model()
    projection = model.model.layers[1].self_attn.qkv_proj
    held, model.model.norm.weight.data[7] = projection.cpu_linear, 0.5
    projection.cpu_linear = lambda *arguments: held(*arguments) * 1.001
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "kqv"]
    assert engine.ask(ReadWeights()).result(timeout=120).unlike == (*names, "model.norm.weight")
    engine.ask(LoadWeights(2, str(other_wide_weights))).result(timeout=120)
    assert engine.ask(ReadWeights()).result(timeout=120).unlike == ()


def in_memory(engine):
    """The model that the engine computes with."""
    vllm = engine._stepper._engine.engine_core.engine_core
    return vllm.model_executor.driver_worker.worker.model_runner.get_model()


def test_a_score_finds_a_tensor_changed_in_place_and_a_stale_copy(
    engine, old, wide_model, other_wide_weights, monkeypatch
):
    sound = engine.stats()
    engine.ask(LoadWeights(1, str(other_wide_weights))).result(timeout=120)
    other = engine.stats()
    assert len(sound.score) == len(other.score) == len(SCORED) - 1 and other.score != sound.score
    assert (sound.score_drift, other.score_drift) == (0.0, 0.0)
    assert whole(engine, 1)[0].weights_version == 1, "it draws as before"
    in_memory(engine).model.norm.weight.data[7] += 0.5
    engine.ask(LoadWeights(2, str(wide_model))).result(timeout=120)
    drifted = engine.stats()
    assert drifted.score_drift > 0.0 and drifted.score == sound.score, "to the bit, and the load has mended it"
    projection, load = in_memory(engine).model.layers[1].self_attn.qkv_proj, engine._stepper.weights.load

    def forgetful(*source):
        held = projection.cpu_linear
        load(*source)
        projection.cpu_linear = held

    monkeypatch.setattr(engine._stepper.weights, "load", forgetful)
    engine.ask(LoadWeights(3, str(other_wide_weights))).result(timeout=120)
    monkeypatch.undo()
    stale = engine.stats()
    assert stale.weights_digest == other.weights_digest, "a checksum of the source does not see it"
    scores = WeightScores(lambda: "bits")
    scores.observe([replace(other, replica_id="a"), replace(stale, replica_id="b"), replace(other, replica_id="c")])
    assert set(scores.unlike) == {"b"}


def test_a_trainers_score_is_near_the_engines(engine, wide_model):
    import torch
    from transformers import AutoModelForCausalLM

    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(wide_model, dtype=dtype)
        assert apart(tailrace.weights_score(model), engine.stats().score) < TOLERANCE
        assert model.training is False


def test_a_load_that_breaks_off_ends_the_engine_and_answers_everybody(engine, old, other_wide_weights):
    def explode(version, source, digest):
        raise ArithmeticError("a bit flipped")

    engine._stepper.weights.load = explode
    boxes = Queue(), Queue()
    engine.submit(chunk(0), boxes[0].put)
    loads = [engine.ask(LoadWeights(version, str(other_wide_weights))) for version in (1, 2)]
    engine.submit(chunk(1, weights_version=1), boxes[1].put)
    assert_same(arrays(boxes[0].get(timeout=60)), old[0])
    assert isinstance(loads[0].exception(timeout=60), ArithmeticError)
    for left in (loads[1].exception(timeout=60), boxes[1].get(timeout=60)):
        assert isinstance(left, EngineDown) and "a bit flipped" in str(left)
    assert not engine.healthy and isinstance(
        engine.ask(LoadWeights(1, str(other_wide_weights))).exception(timeout=60), EngineDown
    )
