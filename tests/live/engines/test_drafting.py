"""One engine that drafts from its groups, with branches verified by copies: the same tokens, and the drafts counted."""

from queue import Queue

import numpy as np
import pytest

from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.context import GroupRef, Source
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import DraftConfig, EngineConfig
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.families.goodput import Goodput
from tailrace.policies.protocol.step_cost import StepCost

TOKENS = 64
PROMPT = np.tile(np.array([504, 2365, 355, 260, 4052, 314, 253, 1568, 282, 260, 1004, 28], np.int32), 3)
GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=0.6, top_p=0.9)


def chunk(group: str, sample: int, sampling, policy, done=()) -> ChunkRequest:
    plan = policy and DraftPlan(GroupRef(f"b/{group}", group), sample, 0, TOKENS, (0, 0), policy)
    return ChunkRequest(
        f"{group}#{sample}:{len(done)}", sample_key(7, 0, "p", sample),
        np.concatenate([PROMPT, np.asarray(done, np.int32)]), len(PROMPT), TOKENS - len(done), sampling, 0, draft=plan,
    )  # fmt: skip


def run(engine, *chunks):
    boxes = [Queue() for _ in chunks]
    for one, box in zip(chunks, boxes, strict=True):
        engine.submit(one, box.put)
    results = [box.get(timeout=120) for box in boxes]
    assert not [result for result in results if isinstance(result, Exception)], results
    return results


@pytest.fixture(scope="module")
def engine(shallow_model):
    draft = DraftConfig(method="group", draft_tokens=8)
    config = EngineConfig(model=str(shallow_model), max_model_len=256, max_running=8, kv_cache_gib=0.25, draft=draft)
    engine = EngineRunner(config, "drafting")
    yield engine
    assert engine.stats().preemptions == 0
    engine.stop()


@pytest.fixture(scope="module")
def plain(engine):
    """Samples without drafts, by temperature: all at once, once for all policies."""
    chunks = [chunk(f"plain-{way.temperature}", sample, way, None) for way in (GREEDY, WARM) for sample in (0, 1, 2)]
    results = run(engine, *chunks)
    return {GREEDY.temperature: results[:3], WARM.temperature: results[3:]}


@pytest.mark.parametrize("policy", [FixedBudget(tokens=6), Goodput()], ids=lambda policy: policy.type)
def test_drafts_change_no_token(engine, plain, policy, monkeypatch):
    """On a machine where drafts pay: by its own seconds a busy one may find that none do."""
    cheap = StepCost((1.0, 64.0), (0.01, 0.02))
    monkeypatch.setattr(engine._stepper._performance.steps, "cost", lambda chunks=0: cheap)
    for sampling in (GREEDY, WARM):
        group = f"{policy.type}-{sampling.temperature}"
        drafted = [run(engine, chunk(group, sample, sampling, policy))[0] for sample in (0, 1, 2)]
        for expected, got in zip(plain[sampling.temperature], drafted, strict=True):
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
            np.testing.assert_allclose(got.raw_logprobs, expected.raw_logprobs, atol=1e-4)
        assert sum(result.drafted_tokens for result in drafted) > 0


def test_every_drafted_token_is_counted_once_by_source_and_position(engine):
    results = run(engine, *(chunk("counted", sample, WARM, FixedBudget(tokens=4)) for sample in range(3)))
    for result in results:
        report = result.drafts
        assert report.drafted.sum() == result.drafted_tokens
        assert report.accepted.sum() == report.accepted_at.sum() == result.accepted_tokens
        assert report.verifications == result.verifications
        assert len(result.token_ids) in (result.verifications + result.accepted_tokens - stop for stop in (0, 1))


def test_a_greedy_sample_is_drafted_from_its_mate(engine):
    first, second = (run(engine, chunk("mates", sample, GREEDY, FixedBudget(tokens=8)))[0] for sample in (0, 1))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    assert first.drafts.accepted[Source.MATE] == 0 < second.drafts.accepted[Source.MATE]
    assert second.verifications <= first.verifications < len(first.token_ids)


def test_a_chunk_that_goes_on_with_all_its_kv_verifies_no_dummy_draft(engine):
    whole = run(engine, chunk("goes-on", 5, WARM, None))[0].token_ids
    known = engine.stats().block_tokens * 2 + 1 - len(PROMPT)  # all but the last token are whole blocks
    assert 0 < known < len(whole)
    (rest,) = run(engine, chunk("goes-on", 5, WARM, None, whole[:known]))
    np.testing.assert_array_equal(rest.token_ids, whole[known:])
    assert (rest.computed_tokens, rest.drafted_tokens) == (1, 0)


def test_what_a_lost_chunk_had_made_is_drafted(engine):
    (whole,) = run(engine, chunk("lost", 0, WARM, FixedBudget(tokens=8)))
    (again,) = run(engine, chunk("lost", 0, WARM, FixedBudget(tokens=8), done=whole.token_ids[:8]))
    np.testing.assert_array_equal(again.token_ids, whole.token_ids[8:])
    assert again.verifications <= -(-len(again.token_ids) // 9) + 2


def test_an_engine_reports_what_it_has_measured_of_steps_and_drafts(engine):
    """Without a pool it computes no prompt that it would time, and fetches nothing."""
    results = run(engine, *(chunk("measured", sample, GREEDY, FixedBudget(tokens=6)) for sample in (0, 1)))
    found, drafts = engine.stats().performance, [result.drafts for result in results]
    assert len(found.step_tokens) > 2 and found.step_s(8) >= found.step_s(1) > 0 and found.start_s > 0
    assert found.made > 1 and found.drafts > 0 and found.step_age_s < 60
    assert found.prefill_token_s == found.fetch_token_s == 0
    (group,) = found.acceptance
    assert group.method == "group" and 0 < group.right <= group.tested
    for report in drafts:
        assert report.accepted.sum() <= report.tested <= report.drafted.sum()
