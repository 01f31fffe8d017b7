"""Adapters of LoRA in one engine: tokens depend on a chunk's own adapter and on nothing else, and a bad one harms none.

One engine in this process, with drafts of the group, two adapters at a time, three kept.
"""

from dataclasses import replace
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from engine_answers import ANSWER_S, held, run
from made_adapters import make_adapter, merged

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.command import (
    FallAsleep,
    ForgetAdapter,
    LoadAdapter,
    LoadWeights,
    NameAdapter,
    ResetCache,
    WakeKv,
)
from tailrace.deployments.messages.errors import AdapterRefused
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.staging.adapter_folder import adapter_digest
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.policies.protocol.events import ChunkEnd

pytestmark = pytest.mark.live

TOKENS = 40
WORDS = np.array([504, 2365, 355, 260, 4052, 314, 253, 1568, 282, 260, 1004, 28], np.int32)
PROMPT = np.tile(WORDS, 3)
NAMES = ("", "poet", "clerk", "judge")
"""Of adapters; the first one is none."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[str, Adapter | None]:
    root = tmp_path_factory.mktemp("adapters")
    made = {name: str(make_adapter(root / name, seed)) for seed, name in enumerate(NAMES) if name}
    return {"": None} | {name: Adapter(name, 1, adapter_digest(path), path) for name, path in made.items()}


@pytest.fixture(scope="module")
def engine(tiny_model):
    limits = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}
    config = EngineConfig(model=str(tiny_model), max_model_len=256, max_running=8, kv_cache_gib=0.1, vllm_args=limits)
    found = EngineRunner(config, "adapted")
    yield found
    assert found.healthy
    found.stop()


def chunk(adapter: Adapter | None, sample: int = 0, done=(), max_tokens: int = TOKENS, **changes) -> ChunkRequest:
    name = adapter.name if adapter else "plain"
    values = {
        "chunk_id": f"{name}/{sample}/{len(done)}",
        "sample_key": sample_key(7, 0, "p", sample),
        "token_ids": np.concatenate([PROMPT, np.asarray(done, np.int32)]),
        "prompt_tokens": len(PROMPT),
        "max_tokens": max_tokens,
        "sampling": SamplingParams(),
        "weights_version": 0,
        "adapter": adapter,
    }
    return ChunkRequest(**(values | changes))


@pytest.fixture(scope="module")
def alone(engine, adapters):
    """By adapter and sample: each whole and by itself, what all else is compared with."""
    return {(name, sample): run(engine, chunk(adapters[name], sample))[0] for name in NAMES for sample in range(2)}


def assert_same(result, expected):
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
    np.testing.assert_allclose(result.raw_logprobs, expected.raw_logprobs, atol=1e-4)


def test_adapters_give_different_tokens(alone):
    assert len({result.token_ids.tobytes() for result in alone.values()}) == len(alone)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_merged_weights(name, alone, adapters, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    if name:
        merged(model, Path(adapters[name].path))
    result = alone[name, 0]
    context = torch.tensor(np.concatenate([PROMPT, result.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(context).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(1, context[0, len(PROMPT) :, None])[:, 0]
    np.testing.assert_allclose(result.raw_logprobs, expected.numpy(), atol=2e-4)


def test_a_batch_of_all_adapters_and_none_changes_nothing(engine, adapters, alone):
    """Four kinds in a batch, of which vLLM computes two adapters at a time; the third one waits."""
    asked = [(name, sample) for sample in range(2) for name in NAMES]
    for key, result in zip(asked, run(engine, *(chunk(adapters[n], s) for n, s in asked)), strict=True):
        assert_same(result, alone[key])


def test_chunks_between_those_of_other_adapters_change_nothing(engine, adapters, alone):
    made = {name: np.empty(0, np.int32) for name in NAMES}
    while any(len(tokens) < TOKENS for tokens in made.values()):
        going = [name for name in NAMES if len(made[name]) < TOKENS]
        for name, result in zip(going, run(engine, *(chunk(adapters[n], 0, made[n], 16) for n in going)), strict=True):
            made[name] = np.concatenate([made[name], result.token_ids])[:TOKENS]
    for name in NAMES:
        np.testing.assert_array_equal(made[name], alone[name, 0].token_ids)


def test_kv_is_kept_apart_by_adapter(engine, adapters):
    engine.ask(ResetCache()).result(60)
    cached = [run(engine, chunk(adapters[name], max_tokens=2))[0].cached_tokens for name in ("", "poet", "clerk") * 2]
    assert cached == [0, 0, 0, 32, 32, 32]


def test_prompts_are_scored_beside_adapters(engine, adapters, alone):
    scored = [chunk(adapters[n], sampling=SamplingParams(prompt_logprobs=1), chunk_id=f"score {n}") for n in NAMES[:3]]
    *found, other = run(engine, *scored, chunk(adapters["clerk"], 1))
    assert len({result.prompt_logprobs.logprobs for result in found}) == 3
    assert_same(other, alone["clerk", 1])


def test_new_weights_keep_the_adapters(engine, adapters, alone, tiny_model, tmp_path):
    """The folder is gone meanwhile: the adapter is the one in memory."""
    moved = replace_path(adapters["poet"], str(tmp_path / "gone"))
    run(engine, chunk(adapters["poet"], max_tokens=1))
    engine.ask(LoadWeights(1, str(tiny_model))).result(120)
    assert_same(run(engine, replace(chunk(moved), weights_version=1))[0], alone["poet", 0])
    assert_same(run(engine, replace(chunk(None), weights_version=1))[0], alone["", 0])
    engine.ask(LoadWeights(0, str(tiny_model))).result(120)


def replace_path(adapter: Adapter, path: str, **changes) -> Adapter:
    return adapter._replace(path=path, **changes)


def test_a_folder_with_another_content_is_refused_and_harms_none(engine, adapters, alone, tmp_path):
    path = make_adapter(tmp_path / "later", 50)
    later = Adapter("later", 1, adapter_digest(str(path)), str(path))
    make_adapter(path, 51)
    refused, other = run(engine, chunk(later), chunk(adapters["poet"], 1))
    assert isinstance(refused, AdapterRefused) and "another content by now" in str(refused)
    assert_same(other, alone["poet", 1])


def test_a_waiting_chunk_can_be_aborted(engine, adapters, alone):
    boxes = [Queue() for _ in NAMES[1:]]
    with held(engine):
        for name, box in zip(NAMES[1:], boxes, strict=True):
            engine.submit(chunk(adapters[name]), box.put)
        engine.abort(chunk(adapters["judge"]).chunk_id)
    *whole, aborted = [box.get(timeout=ANSWER_S) for box in boxes]
    assert aborted.end is ChunkEnd.ABORTED
    for name, result in zip(NAMES[1:], whole, strict=False):
        assert_same(result, alone[name, 0])


def test_names_are_reported_until_they_are_forgotten(engine, adapters):
    engine.ask(NameAdapter(adapters["poet"])).result(60)
    newer = adapters["clerk"]._replace(name="poet", version=2)
    engine.ask(NameAdapter(newer)).result(60)
    engine.ask(NameAdapter(adapters["poet"])).result(60)
    assert [one for one in engine.stats().adapters if one.name == "poet"] == [newer]
    engine.ask(ForgetAdapter("poet")).result(60)
    run(engine, chunk(None, max_tokens=1))
    assert "poet" not in [one.name for one in engine.stats().adapters]


UP = "base_model.model.model.layers.{}.mlp.up_proj.lora_{}.weight"
HEAD = "base_model.model.lm_head"


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("LoRA rank 16 is greater than max_lora_rank 8", {"rank": 16}),
        ("does not yet support DoRA", {"config": {"use_dora": True}}),
        ("lm_head", {"extra": {f"{HEAD}.lora_A.weight": (4, 128)}}),
        ("[4, 64], for a weight of [128, 128]", {"extra": {UP.format(0, "A"): (4, 64)}}),
        ("layers.7.mlp", {"extra": {UP.format(7, "A"): (4, 128), UP.format(7, "B"): (128, 4)}}),
        ("merge it", {"extra": {f"{HEAD}.weight": (8, 8)}}),
    ],
)
def test_a_bad_adapter_is_refused_in_one_line(engine, alone, tmp_path, reason, changes):
    import torch

    changes["extra"] = {name: torch.ones(shape) for name, shape in changes.get("extra", {}).items()}
    path = make_adapter(tmp_path / "bad", 60, **changes)
    with pytest.raises(AdapterRefused) as refusal:
        engine.ask(LoadAdapter(str(path))).result(120)
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)
    assert_same(run(engine, chunk(None))[0], alone["", 0])


def test_folders_that_hold_no_adapter_are_refused(engine, tmp_path):
    for path, reason in ((str(tmp_path), "adapter_config.json"), ("adapters/poet", "absolute")):
        with pytest.raises(AdapterRefused, match=reason):
            engine.ask(LoadAdapter(path)).result(120)


def test_an_engine_with_adapters_sleeps_and_wakes_with_the_same_tokens(engine, adapters):
    def asked():
        return [chunk(adapters[name], sample=11) for name in ("", "poet")]

    before, digest = run(engine, *asked()), engine.stats().weights_digest
    engine.ask(FallAsleep()).result(120)
    (refused,) = run(engine, chunk(adapters["poet"], sample=11))
    assert isinstance(refused, ValueError) and "sleeps" in str(refused)
    engine.ask(LoadWeights(0, "", digest)).result(300)
    engine.ask(WakeKv()).result(120)
    after = run(engine, *asked())
    assert [one.token_ids.tolist() for one in after] == [one.token_ids.tolist() for one in before]
