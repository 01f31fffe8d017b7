"""An engine whose steps are scheduled before the tokens of the ones before have arrived, on a CPU with vLLM's second
model runner, its Triton kernels and ours interpreted: the tokens and records of an engine that waits.
"""

import time
from dataclasses import replace

import numpy as np
import pytest

from tailrace.deployments.engine.stepper import Stepper
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, KvPlan, sample_key
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import ASYNC, DraftConfig, EngineConfig
from tailrace.lab.benchmarks.engine.second_runner import second_runner
from tailrace.policies.families.drafting import FixedBudget

RUNNING = 3
TOKENS = 6
DRAFTED = 3
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20, top_logprobs=2),
    SamplingParams(temperature=1.0, min_p=0.3, repetition_penalty=1.3, bad_words=("the",)),
    SamplingParams(temperature=1.0, ignore_eos=True),
    SamplingParams(temperature=1.0, stop_token_ids=(1955,)),  # the fifth token of its answer
]


@pytest.fixture(scope="module", params=["group", "vllm"])
def config(narrow_model, request):
    """Drafts of the group's index, for which steps wait; and of vLLM's own drafter, here the model itself."""
    # Prompts of 60 tokens are computed in two steps; the first one's rows are inside of them.
    sizes = {"max_model_len": 256, "max_running": RUNNING, "max_batched_tokens": 48, "kv_cache_gib": 0.05}
    drafter = {"method": "draft_model", "model": str(narrow_model), "num_speculative_tokens": DRAFTED - 1}
    args = {"speculative_config": drafter} if request.param == "vllm" else {}
    draft = DraftConfig(method=request.param, draft_tokens=DRAFTED)
    return EngineConfig(model=str(narrow_model), draft=draft, vllm_args=args, **sizes)


@pytest.fixture(scope="module")
def runner():
    """vLLM's second runner, with our samplers of GPUs."""
    with second_runner() as found:
        yield found


class Engine:
    """A stepper, and the results of its chunks by name."""

    def __init__(self, config: EngineConfig, pool=None):
        self.stepper, self.found = Stepper(config, "engine", 0, 0, pool), {}

    def add(self, one: ChunkRequest) -> None:
        self.stepper.add(one, time.monotonic())

    def step(self) -> None:
        self.found |= self.stepper.step()

    def run(self, *chunks: ChunkRequest) -> None:
        for one in chunks:
            self.add(one)
        while self.stepper.busy:
            self.step()


def chunk(name: str, number: int, sampling: SamplingParams, tokens: int, drafts: bool = True) -> ChunkRequest:
    """A sample of a group of its own. A second chunk of a number is made with the tokens of the first as drafts."""
    prompt, plan = np.tile(np.arange(100 + number, 112 + number, dtype=np.int32), 5), None
    if drafts:
        group, policy = GroupRef(f"b/{number}", f"{number}"), FixedBudget(tokens=DRAFTED)
        plan = DraftPlan(group, int(name.startswith("again")), 0, tokens, (0, 0), policy)
    key, shape = sample_key(7, 0, "p", number), (len(prompt), tokens, sampling, 0)
    return ChunkRequest(name, key, prompt, *shape, draft=plan)


def chunks(prefix: str = "", **more) -> list[ChunkRequest]:
    return [chunk(f"{prefix}{i}", i, one, TOKENS - i % 2, **more) for i, one in enumerate(SAMPLINGS)]


def results_of(engine: Engine) -> dict[str, ChunkResult]:
    """More chunks than run at once, of several lengths; an abort in flight; all again with drafts."""
    engine.add(chunk("aborted", 9, SamplingParams(ignore_eos=True), 200))
    for one in chunks():
        engine.add(one)
    while len(engine.found) < len(SAMPLINGS):
        engine.step()
    engine.stepper.abort("aborted", keep_kv=False)
    engine.run(*chunks("again ")[:2])
    return engine.found


def same(found: dict[str, ChunkResult], wanted: dict[str, ChunkResult]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        other = wanted[name]
        assert not isinstance(one, Exception), (name, one)
        count = min(len(one.token_ids), len(other.token_ids)) if name == "aborted" else None
        assert one.token_ids[:count].tolist() == other.token_ids[:count].tolist(), name
        assert count is None or count > TOKENS
        for field in ("logprobs", "raw_logprobs"):
            np.testing.assert_allclose(getattr(one, field)[:count], getattr(other, field)[:count], atol=1e-4)
        assert (one.end, one.close_calls) == (other.end, other.close_calls)
        assert [[token for token, _ in top] for top in one.top_logprobs] == [
            [token for token, _ in top] for top in other.top_logprobs
        ]


def test_steps_ahead_have_the_tokens_of_steps_that_wait(config, runner):
    found = {}
    waits = {"vllm_args": {ASYNC: False} | config.vllm_args}
    for name, settings in (("waits", waits), ("ahead", {})):
        engine = Engine(config.model_copy(update={"model_runner": "v2"} | settings))
        found[name], work = results_of(engine), engine.stepper.stats().work
        again = replace(chunks()[1], chunk_id="loaded", weights_version=1, draft=None)
        engine.stepper.weights.load(1, "", "")  # no step is in flight when no chunk runs
        engine.run(again)
        engine.stepper.close()
        assert (work["steps_ahead"] > work["steps"] // 3) == (name == "ahead")
        kinds = "drafted_tokens", "accepted_tokens"
        drafted, accepted = (sum(getattr(one, kind) for one in found[name].values()) for kind in kinds)
        assert 0 < accepted <= drafted
    same(found["ahead"], found["waits"])
    assert found["ahead"]["loaded"].token_ids.tolist() == found["ahead"]["1"].token_ids.tolist()
    assert {one.end.name for one in found["ahead"].values()} == {"LENGTH", "STOP", "ABORTED"}


KEPT = []
"""The ended engine: see test_engine_faults_pool.py."""


@pytest.fixture(scope="module")
def pooled(config, runner, pool):
    engine = Engine(config.model_copy(update={"model_runner": "v2"}), pool)
    KEPT.append(engine.stepper._engine)
    yield engine
    engine.stepper.close()


def test_a_step_that_raises_in_flight_loses_no_token_and_no_block(pooled, monkeypatch):
    engine = pooled
    sampler = engine.stepper._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.sampler
    inner, raised = type(sampler).__call__, []

    def draws(self, logits, batch, *rest, **given):
        if not raised and len(batch.req_ids) == RUNNING and engine.stepper._pace.in_flight:
            raised.append(True)
            raise RuntimeError("a fault of the device")
        return inner(self, logits, batch, *rest, **given)

    engine.run(*chunks("first "))
    monkeypatch.setattr(type(sampler), "__call__", draws)
    engine.run(*chunks("second "))
    assert raised
    by_turn = {"first": {}, "second": {}}
    for name in [name for name in engine.found if name.split()[0] in by_turn]:
        one = engine.found[name]
        by_turn[name.split()[0]][name.split()[1]] = one
    same(by_turn["second"], by_turn["first"])
    assert not engine.stepper._pace.in_flight and engine.stepper.reset_cache()
    blocks = engine.stepper._scheduler.kv_cache_manager.block_pool
    assert blocks.get_num_free_blocks() == blocks.num_gpu_blocks - 1


def test_kv_of_a_chunk_that_is_aborted_in_flight_is_that_of_its_tokens(config, pooled):
    engine = pooled
    block, warm = config.block_tokens, SamplingParams(temperature=0.8, ignore_eos=True)
    whole = chunk("whole", 3, warm, 3 * block - 60 + 12, drafts=False)
    engine.run(whole)
    first = replace(whole, chunk_id="aborted", max_tokens=3 * block, kv=KvPlan(0))
    engine.add(first)
    # The step in flight fills a block: with its first token, or with drafts that are not verified yet.
    while (known := len(first.token_ids) + len(engine.stepper.peek("aborted"))) < 3 * block - config.proposed_tokens:
        engine.step()
    assert known < 3 * block if config.proposed_tokens else known == 3 * block
    assert engine.stepper._pace.in_flight
    engine.stepper.abort("aborted", keep_kv=True)
    while engine.stepper.busy:
        engine.step()
    made = engine.found["aborted"].token_ids
    assert engine.stepper.reset_cache()
    context = np.concatenate([first.token_ids, made])
    engine.run(replace(first, chunk_id="rest", token_ids=context, max_tokens=whole.max_tokens - len(made)))
    rest = engine.found["rest"]
    assert engine.found["aborted"].stored_tokens == known // block * block and rest.pulled_tokens == 2 * block
    engine.run(replace(first, chunk_id="later", token_ids=np.append(context, rest.token_ids[0]), max_tokens=8))
    assert engine.found["whole"].token_ids.tolist() == [*made, *rest.token_ids]
    assert engine.found["later"].token_ids.tolist() == rest.token_ids[1:9].tolist()
    assert engine.stepper.stats().work["steps_ahead"] > len(made)
