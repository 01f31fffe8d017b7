"""An engine with the samplers of GPUs, its kernel interpreted: the tokens and records of one with those of CPUs.

It shows that vLLM's model runner has the positions, and lays out rows and drafts, as the samplers take them.
"""

from queue import Queue

import numpy as np
import pytest
from looked_up import drafted, looked_up

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.lab.benchmarks.engine import interpreted

pytestmark = pytest.mark.live

TOKENS = 12
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.2),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.0, min_p=0.3),
]


@pytest.fixture(scope="module")
def config(narrow_model):
    # Prompts of 60 tokens are computed in two steps; the first one's rows are inside of them.
    sizes = {"max_model_len": 256, "max_running": 4, "max_batched_tokens": 48, "kv_cache_gib": 0.05}
    return EngineConfig(model=str(narrow_model), **looked_up(3, shortest=1), close_call_tolerance=0.02, **sizes)


def results_of(config, name):
    engine, boxes = EngineRunner(config, name), [Queue() for _ in SAMPLINGS]
    try:
        for sample, box in enumerate(boxes):
            prompt = np.tile(np.arange(100 + sample, 112 + sample, dtype=np.int32), 5)
            key, shape = sample_key(7, 0, "p", sample), (len(prompt), TOKENS, SAMPLINGS[sample], 0)
            engine.submit(ChunkRequest(f"{sample}/0", key, prompt, *shape, draft=drafted(3)), box.put)
        return [box.get(timeout=200) for box in boxes]
    finally:
        engine.stop()


def test_an_engine_with_them_emits_the_same(config, monkeypatch):
    wanted = results_of(config, "cpu")
    interpreted.interpreted()
    try:
        from tailrace.deployments.vllm_exact import worker
        from tailrace.deployments.vllm_exact.fused.device_sampler import DeviceSampler

        monkeypatch.setattr(worker.ExactCPUWorker, "sampler_of", lambda self, runner: DeviceSampler(runner))
        found = results_of(config, "device")
    finally:
        interpreted.forget()
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
        assert one.close_calls == other.close_calls and one.accepted_tokens == other.accepted_tokens
    assert sum(each.accepted_tokens for each in found) > 0
