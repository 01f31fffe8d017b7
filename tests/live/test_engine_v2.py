"""An engine with vLLM's second model runner, its Triton kernels and ours interpreted: tokens and records of one with the
first runner on the CPU.

It shows that V2's states, positions, drafts and outputs are as the samplers take them and give them, step after step.
"""

import numpy as np

from tailrace.deployments.vllm_exact import worker
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tests.live.test_device_engine import config, results_of  # noqa: F401 - a fixture
from tests.runner_v2 import second_runner


def test_an_engine_of_v2_emits_the_same(config, monkeypatch):  # noqa: F811
    config = config.model_copy(update={"draft": DraftConfig(method="group", draft_tokens=3)})
    wanted = results_of(config, "cpu")
    print([(each.drafted_tokens, each.accepted_tokens) for each in wanted])
    with second_runner(monkeypatch):
        from tailrace.deployments.vllm_exact.fused.sampler_v2 import SamplerV2

        monkeypatch.setattr(worker.ExactCPUWorker, "sampler_of", lambda self, runner: SamplerV2(runner))
        found = results_of(config.model_copy(update={"model_runner": "v2"}), "v2")
    print([(each.drafted_tokens, each.accepted_tokens) for each in found])
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
        assert one.close_calls == other.close_calls
    assert sum(each.accepted_tokens for each in found) > 0
