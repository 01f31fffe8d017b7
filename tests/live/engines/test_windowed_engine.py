"""Canonical windows in engines of vLLM on the CPU, in bfloat16: tokens and logprobs are the same bits in any batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_answers import run
from looked_up import drafted, looked_up

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.command import LoadWeights, ResetCache
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig

pytestmark = pytest.mark.live

SAMPLES, TOKENS = range(6), 40
LENGTHS = (12, 33, 64, 100, 700, 1_900)
"""Tokens of the prompts. Beyond some 640 tokens vLLM's kernel has several tiles of KV for a long piece of a prompt."""


def started(model, name, exactness="bits", **changes):
    shape = {"max_model_len": 2_048, "max_running": 8, "kv_cache_gib": 0.2, "dtype": "bfloat16"} | changes
    engine = EngineRunner(EngineConfig(model=str(model), exactness=exactness, **shape), name)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def windowed(tiny_model):
    yield from started(tiny_model, "windowed", draft=DraftConfig(method="off"))


@pytest.fixture(scope="module")
def drafting(tiny_model):
    """Its steps verify drafts of several lengths, and take prompts in pieces of other lengths."""
    yield from started(tiny_model, "drafting", **looked_up(5, shortest=1), max_batched_tokens=83)


@pytest.fixture(scope="module")
def lawful(tiny_model):
    yield from started(tiny_model, "lawful", exactness="law", draft=DraftConfig(method="off"))


def chunk(sample, done=(), tokens=TOKENS, **changes):
    prompt = np.random.default_rng(sample).integers(100, 140, LENGTHS[sample], np.int32)
    one = ChunkRequest(
        chunk_id=f"{sample}/{len(done)}",
        sample_key=sample_key(3, 0, "p", sample),
        token_ids=np.concatenate([prompt, np.asarray(done, np.int32)]),
        prompt_tokens=len(prompt),
        max_tokens=tokens,
        sampling=SamplingParams(ignore_eos=True, temperature=float(sample % 2)),  # greedy ones repeat themselves
        weights_version=0,
        draft=drafted(5),
    )
    return replace(one, **changes)


def bits(results):
    return [(one.token_ids.tolist(), one.logprobs.tobytes(), one.raw_logprobs.tobytes()) for one in results]


def alone(engine):
    found = []
    for sample in SAMPLES:
        found += run(engine, chunk(sample))
        engine.ask(ResetCache()).result()
    return bits(found)


def in_pieces(engine, sample, size, forget):
    done, raw = [], b""
    while len(done) < TOKENS:
        (result,) = run(engine, chunk(sample, done, min(size, TOKENS - len(done))))
        done, raw = done + result.token_ids.tolist(), raw + result.raw_logprobs.tobytes()
        if forget:  # the next chunk computes its context again, as a replica does that pulls no KV
            engine.ask(ResetCache()).result()
    return done, raw


def test_bits_are_those_of_any_batch_chunks_and_drafts(windowed, drafting):
    wanted = alone(windowed)
    assert bits(run(windowed, *map(chunk, SAMPLES))) == wanted
    drafted = run(drafting, *map(chunk, SAMPLES))
    assert bits(drafted) == wanted and sum(one.accepted_tokens for one in drafted) > 0
    assert alone(drafting) == wanted
    for sample in SAMPLES:
        for forget in (False, True):
            assert in_pieces(windowed, sample, 7, forget) == (wanted[sample][0], wanted[sample][2])


def test_the_comparison_sees_a_product_whose_bits_depend_on_the_batch(lawful):
    model = lawful._stepper._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    projection = model.model.layers[1].self_attn.qkv_proj
    product = projection.cpu_linear

    def otherwise(*arguments):  # not all processors' products do so by themselves
        found = product(*arguments)
        return found if len(found) == 1 else (found.view(torch.int16) ^ 1).view(torch.bfloat16)

    projection.cpu_linear = otherwise
    assert bits(run(lawful, *map(chunk, SAMPLES))) != alone(lawful)


def test_windows_stay_when_weights_change(windowed, other_tiny_weights):
    before = alone(windowed)
    windowed.ask(LoadWeights(1, str(other_tiny_weights))).result()
    samples = [chunk(sample, weights_version=1) for sample in SAMPLES]
    together = bits(run(windowed, *samples))
    assert together != before
    for sample, wanted in zip(samples, together, strict=True):
        windowed.ask(ResetCache()).result()
        assert bits(run(windowed, sample)) == [wanted]
