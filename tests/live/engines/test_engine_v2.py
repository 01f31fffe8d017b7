"""An engine with vLLM's second model runner on a CPU, its Triton kernels and ours interpreted: the tokens and records
of one with the first runner.

It shows that V2's states, positions, drafts and outputs are as the samplers take them and give them, step after step.
"""

from queue import Queue

import numpy as np
import pytest

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.lab.benchmarks.engine.second_runner import second_runner
from tailrace.policies.families.drafting import FixedBudget

TOKENS = 5
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.2),
    SamplingParams(temperature=0.8, top_k=20, top_logprobs=2),
    SamplingParams(temperature=1.0, min_p=0.3, repetition_penalty=1.3, presence_penalty=0.5, bad_words=("the",)),
]
AGAIN = 2  # of these are made in the second turn


@pytest.fixture(scope="module")
def config(narrow_model):
    # Prompts of 60 tokens are computed in two steps; the first one's rows are inside of them.
    sizes = {"max_model_len": 256, "max_running": len(SAMPLINGS), "max_batched_tokens": 48, "kv_cache_gib": 0.05}
    draft = DraftConfig(method="group", draft_tokens=3)
    close = {"close_call_tolerance": 0.02, "redraw_close_calls": True}
    return EngineConfig(model=str(narrow_model), draft=draft, **close, **sizes)


def chunk(number: int, sampling: SamplingParams, turn: int) -> ChunkRequest:
    """A sample of a group of its own; in the second turn it is made again, with the first one's tokens as drafts."""
    prompt = np.tile(np.arange(100 + number, 112 + number, dtype=np.int32), 5)
    group = GroupRef(f"b/{number}", f"{number}")
    plan = DraftPlan(group, turn, 0, TOKENS, (0, 0), FixedBudget(tokens=3))
    key, shape = sample_key(7, 0, "p", number), (len(prompt), TOKENS, sampling, 0)
    return ChunkRequest(f"{number}/{turn}", key, prompt, *shape, draft=plan)


def results_of(config, name) -> list:
    engine, results = EngineRunner(config, name), []
    try:
        for turn in (0, 1):
            chosen = SAMPLINGS[: AGAIN if turn else None]
            boxes = [Queue() for _ in chosen]
            for number, (sampling, box) in enumerate(zip(chosen, boxes, strict=True)):
                engine.submit(chunk(number, sampling, turn), box.put)
            results += [box.get(timeout=300) for box in boxes]
        assert not [result for result in results if isinstance(result, Exception)], results
        return [*results, engine.stats()]
    finally:
        engine.stop()


def test_an_engine_of_v2_emits_the_same(config):
    *wanted, _ = results_of(config, "v1")
    with second_runner():
        *found, stats = results_of(config.model_copy(update={"model_runner": "v2"}), "v2")
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
        assert one.close_calls == other.close_calls
        assert [[token for token, _ in top] for top in one.top_logprobs] == [
            [token for token, _ in top] for top in other.top_logprobs
        ]
    drafted, accepted = (sum(getattr(each, name) for each in found) for name in ("drafted_tokens", "accepted_tokens"))
    assert stats.work["redraws"] > 0
    assert 0 < accepted < drafted
