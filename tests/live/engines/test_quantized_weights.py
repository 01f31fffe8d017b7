"""Weights in FP8, which the engine quantizes as it loads them, by `fp8_per_channel`: the form that a CPU has.

New weights are those of an engine that was started on them, to the bit of what is computed with.
"""

import shutil
from queue import Queue

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.command import FallAsleep, LoadWeights, ReadWeights, ResetCache, WakeKv
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig

pytestmark = pytest.mark.live

TOKENS = 8
"""Of an answer. PyTorch's product of FP8 matrices takes 0.2 s a step on a CPU."""


@pytest.fixture(scope="module")
def newer(narrow_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("newer") / "model"
    shutil.copytree(narrow_model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: 1.5 * tensor.flip(0) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def started(model, **vllm_args) -> EngineRunner:
    draft = DraftConfig(method="off")
    sizes = {"max_model_len": 256, "max_running": 4, "kv_cache_gib": 0.05}
    config = EngineConfig(
        model=str(model), dtype="bfloat16", exactness="law", draft=draft, vllm_args=vllm_args, **sizes
    )
    return EngineRunner(config, "engine")


def answers(engine: EngineRunner, version: int) -> list[list[int]]:
    """Samples, each alone: steps of one shape have the same bits."""
    found = []
    for sample in range(3):
        box, prompt = Queue(), np.arange(100 + sample, 112, dtype=np.int32)
        given = sample_key(7, 0, "p", sample), prompt, len(prompt), TOKENS, SamplingParams(ignore_eos=True), version
        engine.submit(ChunkRequest(f"{sample}/{version}", *given), box.put)
        result = box.get(timeout=60)
        assert not isinstance(result, Exception), result
        found.append(result.token_ids.tolist())
    return found


def test_new_weights_are_quantized_as_at_a_start(narrow_model, newer):
    engine = started(newer, quantization="fp8_per_channel")
    found = {"new": (answers(engine, 0), engine.ask(ReadWeights()).result(timeout=60))}
    engine.stop()
    engine = started(narrow_model, quantization="fp8_per_channel")
    try:
        found["old"] = answers(engine, 0), engine.ask(ReadWeights()).result(timeout=60)
        for version, (name, folder) in enumerate((("new", newer), ("old", narrow_model)), 1):
            engine.ask(LoadWeights(version, str(folder))).result(timeout=60)
            assert engine.ask(ResetCache()).result(timeout=60)
            read = engine.ask(ReadWeights()).result(timeout=60)
            assert answers(engine, version) == found[name][0]
            assert read.checksums == found[name][1].checksums
            engine.ask(FallAsleep()).result(timeout=60)
            engine.ask(LoadWeights(version, str(folder))).result(timeout=60)
            engine.ask(WakeKv()).result(timeout=60)
            assert engine.ask(ReadWeights()).result(timeout=60).checksums == read.checksums
            assert (read.unlike, read.problem) == (None, "quantized weights have other values than their source")
    finally:
        engine.stop()
    (old, read), (new, other) = found["old"], found["new"]
    scales = [name for name in read.checksums if name.endswith("_scale")]
    assert old != new and len(scales) == 8, "four products of each of two layers"
    assert not set(read.checksums.values()) & set(other.checksums.values())
