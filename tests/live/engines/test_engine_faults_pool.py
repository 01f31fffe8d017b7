"""Steps that raise on an engine with a KV pool: no KV that was not computed is saved under a name, and none is lost."""

from ctypes import memset
from itertools import chain
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
from engine_answers import ANSWER_S
from test_engine_faults import MATES, PROMPT, TOKENS, in_sampler, planted, run, stepper_of
from vllm.distributed.kv_transfer import get_kv_transfer_group
from waiting import until

from tailrace.deployments.engine.engine_loop import EngineLoop
from tailrace.deployments.engine.stepper import Stepper
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, KvPlan, sample_key
from tailrace.deployments.messages.errors import RequestRefused
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

KEPT = []
"""Ended engines. Symptom (vLLM 0.32): collected as garbage, an engine with a pool waits for ever for a thread of vLLM's
that holds a socket of its ZeroMQ context; a replica's process ends with its engine."""

FIRST = 70
"""Tokens of a first chunk: with its prompt three blocks of 32."""


def chunk(name: str, sample: int, done=(), max_tokens=FIRST, **changes) -> ChunkRequest:
    values = {
        "chunk_id": f"{name}{sample}",
        "sample_key": sample_key(7, 0, "p", sample),
        "token_ids": np.concatenate([np.roll(PROMPT, sample), np.asarray(done, np.int32)]),
        "prompt_tokens": len(PROMPT),
        "max_tokens": max_tokens,
        "sampling": SamplingParams(ignore_eos=True),
        "weights_version": 0,
        "kv": KvPlan(0),
    }
    return ChunkRequest(**values | changes)


@pytest.fixture(scope="module")
def loop(tiny_model, pool):
    config = EngineConfig(model=str(tiny_model), max_model_len=256, max_running=8, kv_cache_gib=0.05)
    stepper = Stepper(config, "pooled", 0, 0, pool)
    KEPT.append((stepper, stepper._engine))
    loop = EngineLoop(stepper)
    yield loop
    loop.end()


@pytest.fixture(scope="module")
def wanted(loop) -> dict[int, ChunkResult]:
    """Whole answers without a fault and without the pool, by sample."""
    asked = [chunk("whole", sample, max_tokens=FIRST + TOKENS, kv=None) for sample in MATES]
    return dict(zip(MATES, run(loop, *asked), strict=True))


def assert_same(found: ChunkResult, wanted: ChunkResult, part: slice) -> None:
    """Tokens, and logprobs: those of this model move by 1e-2 and more where the KV is not the context's."""
    np.testing.assert_array_equal(found.token_ids, wanted.token_ids[part])
    np.testing.assert_allclose(found.raw_logprobs, wanted.raw_logprobs[part], atol=1e-4)


def test_another_context_shows_in_the_logprobs(loop, wanted):
    """Else the tests below would show nothing: one other token at the start of the prompt, the same answer forced."""
    answer = wanted[0].token_ids
    for place in (0, len(PROMPT) - 1):
        other = chunk("other", 0, max_tokens=len(answer), kv=None, forced=answer)
        other.token_ids[place] += 1
        (found,) = run(loop, other)
        moved = np.abs(found.raw_logprobs - wanted[0].raw_logprobs)
        assert moved[:FIRST].max() > 1e-2 < moved[FIRST:].max()


def assert_continued_from_the_pool(loop, wanted, name: str, results) -> None:
    """The next chunks read the KV that the first ones saved, and have the tokens of a run without any of it."""
    for sample, result in zip(MATES, results, strict=True):
        assert_same(result, wanted[sample], slice(FIRST))
    assert loop._stepper.reset_cache()
    later = [
        chunk(f"later {name}", sample, one.token_ids, TOKENS, kv=KvPlan(0, save=False))
        for sample, one in zip(MATES, results, strict=True)
    ]
    for sample, result in zip(MATES, run(loop, *later), strict=True):
        assert_same(result, wanted[sample], slice(FIRST, None))
        assert result.pulled_tokens >= 96


@pytest.mark.parametrize("at", [0, 1, 30, 61])
def test_a_request_that_raises_leaves_the_pool_whole(loop, wanted, monkeypatch, at):
    with in_sampler(loop, monkeypatch, {3: at}) as raises:
        *results, refused = run(loop, *(chunk(f"at {at}/", sample) for sample in (*MATES, 3)))
    assert raises and isinstance(refused, RequestRefused) and not loop.stats().running
    assert_continued_from_the_pool(loop, wanted, f"at {at}/", results)


@pytest.mark.parametrize("after", [False, True], ids=["before the pass", "after it"])
def test_a_pass_that_raises_once_leaves_the_pool_whole(loop, wanted, monkeypatch, after):
    """The saves of its step are due then: half of the mates have just ended their chunks."""
    runner, calls = stepper_of(loop)._engine.model_executor.driver_worker.worker.model_runner, []

    def is_due(*_) -> bool:
        calls.append(None)
        return len(calls) == FIRST  # the step after the first of them: their saves travel with it

    name = f"once {after}/"
    with planted(monkeypatch, runner, "execute_model", is_due, after) as raises:
        results = run(loop, *(chunk(name, sample) for sample in MATES))
    assert len(raises) == 1
    assert_continued_from_the_pool(loop, wanted, name, results)


def test_a_pull_is_timed_by_its_transfer_and_not_by_the_step_beside_it(loop, monkeypatch):
    """Else a busy engine takes pulls for slow, and computes short beginnings again that the pool has."""
    (first,) = run(loop, chunk("timed ", 0))
    assert loop._stepper.reset_cache()
    runner, pulls = stepper_of(loop)._engine.model_executor.driver_worker.worker.model_runner, []
    execute, now_s = runner.execute_model, [1.0]

    def a_step_of_a_second(*given, **named):
        """It ends after all loads have come. Nothing else moves the clock, so a load takes 0 s."""
        made = execute(*given, **named)
        until(lambda: all(load.arrived_s for load in get_kv_transfer_group().connector_worker._loads.values()))
        now_s[0] += 1.0
        return made

    monkeypatch.setattr(runner, "execute_model", a_step_of_a_second)
    monkeypatch.setattr("tailrace.kvpool.worker.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(stepper_of(loop)._performance, "pull", lambda tokens, took_s, now_s: pulls.append(took_s))
    beside, later = chunk("beside ", 1, max_tokens=4, kv=None), chunk("timed later ", 0, first.token_ids, 4)
    _, found = run(loop, beside, later)
    assert found.pulled_tokens >= 96 and pulls == [0.0]


def test_a_late_pull_writes_into_no_block_that_is_computed_again(loop, wanted, monkeypatch):
    """A block of the context is found here, so vLLM keeps the request's blocks where it computes invalid ones again."""
    (first,) = run(loop, chunk("late ", 0))
    assert loop._stepper.reset_cache()
    run(loop, chunk("beside it ", 0, max_tokens=1, kv=None))
    worker, runner = get_kv_transfer_group().connector_worker, stepper_of(loop)._engine.model_executor
    runner, began, come = runner.driver_worker.worker.model_runner, Event(), Event()
    execute, get = runner.execute_model, worker.store.batch_get_into_multi_buffers

    def broken_after(keys, addresses, sizes):
        assert began.wait(ANSWER_S)
        found = get(keys, addresses, sizes)
        for address, size in zip(chain(*addresses), chain(*sizes), strict=True):
            memset(address, 0, size)
        come.set()
        return found

    def a_step_before_it(scheduled, *given, **named):
        made = execute(scheduled, *given, **named)
        if scheduled.total_num_scheduled_tokens:
            began.set()
            assert come.wait(ANSWER_S)
        return made

    monkeypatch.setattr(runner, "execute_model", a_step_before_it)
    monkeypatch.setattr(worker.store, "batch_get_into_multi_buffers", broken_after)
    monkeypatch.setattr(worker, "_load_deadline_s", 0.0)
    (found,) = run(loop, chunk("later ", 0, first.token_ids, TOKENS, kv=KvPlan(0, save=False)))
    assert_same(found, wanted[0], slice(FIRST, None))
    assert (found.recompute_cause, found.pulled_tokens, found.cached_tokens) == ("pull_late", 0, 32)
