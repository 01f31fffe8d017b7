"""On the first GPU: vLLM's second model runner with our samplers, a step of it and whole engines.

Each test says what it will show. None has run yet: there was no GPU where they were written.
"""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from looked_up import looked_up

from tailrace.deployments.vllm_exact import kernel_cpu
from tailrace.deployments.vllm_exact.sampler import extra_args
from tailrace.deployments.vllm_exact.sampling_columns import COLUMNS
from tests.step_runner import PROMPT, chunk
from tests.step_v2 import Steps, runner_v2

pytestmark = pytest.mark.gpu
VOCAB = 49_152
DRAFTS = [{}, {0: [5, 6], 2: [7, 7, 7]}]


@contextmanager
def waits_raise():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_step_of_v2_waits_for_nothing_and_draws_the_tokens_of_the_cpu(fused, drafts):
    """Shows that sampling in V2 asks the device for nothing: torch raises on any wait of its own."""
    from vllm.v1.worker.gpu import model_runner

    sampling = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}]
    args = [extra_args(chunk(i, **each), 2, tolerance=0.1, stops=True) for i, each in enumerate(sampling)]
    logits = torch.randn(len(args), 64, VOCAB, device="cuda")
    steps = Steps(runner_v2(model_runner, VOCAB, "cuda"), args, [[3] * PROMPT for _ in args])
    first = steps.step(dict.fromkeys(range(4), PROMPT), {}, lambda i, place: logits[i, place])  # compiles
    steps.step(dict.fromkeys(range(4), 2), {i: [1] for i in range(4)}, lambda i, place: logits[i, place])
    steps.sampler.take_closed()
    steps.watch = waits_raise
    steps.step({i: 1 + len(drafts.get(i, [])) for i in range(4)}, drafts, lambda i, place: logits[i, place])
    for i, one in enumerate(args):
        columns = {name: np.array([one[name]], kind) for name, kind in COLUMNS.items()}
        *filters, tolerance = (columns.pop("key"), np.array([PROMPT]), *columns.values())
        row = logits[i, PROMPT][None].cpu().numpy()
        assert first[i] == kernel_cpu.sample_rows(row, *filters, np.array([-1], np.int32), tolerance)[0].tolist()
    assert np.isfinite(steps.sampler.records.take("r0", PROMPT, 1).logprobs).all()


@pytest.mark.parametrize("method", ["group", "vllm", "off"])
def test_an_engine_of_v2_emits_what_one_of_v1_does(model_dir, method):
    """Shows that V2 carries Tailrace's drafts, vLLM's n-grams, rules for tokens and redraws, with CUDA graphs on."""
    from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
    from tests.live.engines.test_engine_v2 import SAMPLINGS, results_of

    sizes = {"max_model_len": 256, "max_running": len(SAMPLINGS), "max_batched_tokens": 64, "kv_cache_gib": 0.25}
    close = {"exactness": "bits", "close_call_tolerance": 0.02, "redraw_close_calls": True}
    draft = looked_up(3, shortest=1) if method == "vllm" else {"draft": DraftConfig(method=method, draft_tokens=3)}
    found = {}
    for runner in ("v1", "v2"):
        config = EngineConfig(
            model=str(model_dir), device="gpu", dtype="bfloat16", model_runner=runner, **draft, **close, **sizes
        )
        *found[runner], _ = results_of(config, runner)
    assert [each.token_ids.tolist() for each in found["v2"]] == [each.token_ids.tolist() for each in found["v1"]]
    for one, other in zip(found["v2"], found["v1"], strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=0.05)
    assert method == "off" or sum(each.accepted_tokens for each in found["v2"]) > 0
