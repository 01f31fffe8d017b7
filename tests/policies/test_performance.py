"""A replica's measured performance: one estimator, one record; each figure with its age, the readings of placements."""

from random import Random

import pytest
from performances import performance

from tailrace.policies.core.scaling import left_s, move_s
from tailrace.policies.models.acceptance_estimator import HALF_S, AcceptanceEstimator
from tailrace.policies.models.performance_estimator import PerformanceEstimator
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import (
    FADE,
    PRIOR,
    PRIOR_TOKENS,
    Performance,
    chance,
    count_tested,
    seconds_at,
)

BASE_S, CHUNK_S, TOKEN_S = 0.06, 0.004, 0.003


def run(measured: PerformanceEstimator, steps: int, drafts: int, prompt_each: int = 16, made: int = 1) -> None:
    """Decode steps of 1 to 8 chunks with as many draft tokens each; each `prompt_each`-th computes a prompt too."""
    for step in range(steps):
        chunks, decodes = 1 + step % 8, step % prompt_each > 0
        tokens = chunks + (drafts * chunks if decodes else 200)
        took_s = BASE_S + CHUNK_S * chunks + TOKEN_S * (tokens - chunks)
        if decodes:
            measured.step(chunks, tokens, took_s, made * chunks, 0.1 * step)
        else:
            measured.prompt(chunks, tokens, took_s, 0.1 * step)


@pytest.mark.parametrize("drafts", [0, 3, 15])
def test_a_decode_step_has_the_drafts_that_chunks_have_verified(drafts):
    measured = PerformanceEstimator()
    run(measured, 800, drafts, made=1 + drafts // 3)
    found = measured.report(80.0, 80.0)
    for chunks in (1, 4, 8):
        assert found.step_s(chunks) == pytest.approx(BASE_S + (CHUNK_S + drafts * TOKEN_S) * chunks, rel=0.05)
    assert found.drafts == pytest.approx(drafts) and found.made == pytest.approx(1 + drafts // 3)
    assert found.token_s(4) == pytest.approx(found.step_s(4) / (1 + drafts // 3))
    assert found.prefill_token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_it_follows_drafts_that_get_longer():
    measured = PerformanceEstimator()
    run(measured, 800, 2)
    before = measured.report(0.0, 0.0)
    run(measured, 800, 12, made=3)
    after = measured.report(0.0, 0.0)
    assert after.drafts == pytest.approx(12, rel=0.05) and after.made == pytest.approx(3, rel=0.05)
    assert before.step_s(8) < after.step_s(8)


def test_prompts_and_pulls_are_remembered_over_any_number_of_steps():
    """A fit of all would forget what a chunk of hundreds of steps has none of."""
    measured = PerformanceEstimator()
    for tokens, took_s in ((1000, 0.02), (2000, 0.03)):
        measured.pull(tokens, took_s, 1.0)
    run(measured, 32, 0)
    before = measured.report(2.0, 0.0)
    for step in range(5_000):
        measured.step(1 + step % 4, 1 + step % 4, BASE_S, 1 + step % 4, 100.0)
    after = measured.report(101.0, 500.0)
    assert after.prefill_token_s == before.prefill_token_s and after.fetch_token_s == before.fetch_token_s > 0
    assert (after.step_age_s, after.fetch_age_s, after.observed_at) == (1.0, 100.0, 500.0)
    assert after.prefill_age_s > 90


def test_nothing_is_reported_before_steps_of_two_sizes_and_nothing_that_was_not_measured():
    measured = PerformanceEstimator()
    measured.pull(1000, 0.02, 0.0)
    measured.step(1, 1, 0.02, 1, 0.0)
    assert measured.report(0.0, 0.0) is None
    measured.step(4, 4, 0.03, 4, 0.0)
    found = measured.report(0.0, 0.0)
    assert (found.prefill_token_s, found.acceptance, found.drafter_seconds) == (0.0, (), ())
    measured.drafter_step(1, 0.001, 0.0)
    measured.drafter_step(8, 0.002, 0.0)
    assert measured.report(0.0, 0.0).drafter_seconds == pytest.approx((0.001, 0.002))


def test_the_tested_tokens_are_the_right_ones_and_the_first_wrong_one():
    assert [count_tested(right, 4) for right in range(5)] == [1, 2, 3, 4, 4] and count_tested(0, 0) == 0


def test_the_chance_of_a_draft_token_is_found_whatever_the_length_of_drafts():
    """Right for 0.7 if all before are: of what was drafted, the share that is right depends on the length."""
    for length in (2, 16):
        found, luck = AcceptanceEstimator(), Random(length)
        for turn in range(4_000):
            right = next((place for place in range(length) if luck.random() >= 0.7), length)
            found.count(DraftMethod.GROUP, right, count_tested(right, length), float(turn))
        assert found.chance(DraftMethod.GROUP) == pytest.approx(0.7, abs=0.1)
        (report,) = found.report(4_009.0)
        assert (report.method, report.age_s) == ("group", 10.0) and report.tested < length / (1 - FADE)


def test_before_any_draft_there_is_the_prior_and_it_weighs_a_few_tokens():
    found = AcceptanceEstimator()
    assert found.chance("group") == found.overall() == PRIOR and found.chance("group", 0.8) == 0.8
    found.count("group", 0, PRIOR_TOKENS)
    assert found.chance("group", 0.8) == chance(0, PRIOR_TOKENS, 0.8) == 0.4 and found.chance("model") == PRIOR


def test_drafts_that_were_tested_long_ago_count_less_and_new_tests_decide_soon():
    found = AcceptanceEstimator()
    for _ in range(200):
        found.count("group", 0, 4, 50.0)
    at = [HALF_S * times + 51.0 for times in range(12)]
    means = [found.overall(now_s) for now_s in at]
    reported = [chance(one.right, one.tested) for now_s in at for one in found.report(now_s)]
    assert means == reported == sorted(means) and means[0] < 0.02 and means[-1] > 0.45
    for turn in range(20):
        found.count("group", 3, 4, at[-1] + turn)
    assert found.overall(at[-1] + 20) > 0.7, "by the old counts it would be 0.1"


def test_a_step_is_on_the_line_between_its_points_and_beyond_them():
    known = Performance(0.0, (2.0, 10.0, 20.0), (1.0, 3.0, 4.0), chunk_s=0.5, drafts=1.0, made=2.0)
    found = [seconds_at(x, known.step_tokens, known.step_seconds) for x in (1, 2, 6, 10, 15, 20, 40)]
    assert found == [1, 1, 2, 3, 3.5, 4, 6]
    assert known.step_s(5) == 3.0 + 2.5 and known.token_s(5) == 5.5 / 2
    base_s, each_s = performance(base=0.02, chunk=0.003).line(8)
    assert (base_s, each_s) == (pytest.approx(0.02), pytest.approx(0.003))


def test_kv_comes_by_the_faster_way_that_was_measured():
    assert performance(1_000.0, 10_000.0, 0.01).move_s(1_000) == pytest.approx(0.11)
    assert performance(1_000.0, 10_000.0, 9.0).move_s(1_000) == pytest.approx(1.0)
    assert performance(1_000.0, 0.0).move_s(1_000) == pytest.approx(1.0)
    assert performance(0.0, 10_000.0, 0.0).move_s(1_000) == pytest.approx(0.1) and performance(0.0, 0.0).move_s(1) == 0


class Moving:
    """A chunk in the midst of its sample."""

    max_tokens = 100

    class sample:
        expected_tokens, generated_tokens, streamed_tokens, context_tokens = 500, 100, 20, 110


def test_what_is_left_of_a_chunk_goes_by_the_tokens_that_a_step_brings():
    plain, drafting = performance(base=0.02, chunk=0.001), performance(base=0.02, chunk=0.001, made=4.0)
    assert left_s(Moving, plain, 10) == pytest.approx(80 * 0.03) and left_s(Moving, drafting, 10) == pytest.approx(0.6)
    assert move_s(Moving, plain) == pytest.approx(0.01 + 130 / 10_000)
    assert move_s(Moving, performance(0.0, 0.0)) == float("inf"), "nothing was measured: it stays to its end"


def test_a_token_of_context_has_the_seconds_by_which_steps_of_as_many_tokens_differ():
    """Noise of a tenth of a step does not hide it; contexts that are all alike tell nothing."""
    for alike, expected in ((False, 1e-6), (True, 0.0)):
        measured, noise = PerformanceEstimator(), Random(0)
        for step in range(800):
            chunks = 1 + step % 8
            context = 4_000 * chunks if alike else chunks * (step % 97) * 100
            took_s = BASE_S + CHUNK_S * chunks + (0.0 if alike else 1e-6 * context) + 0.006 * noise.random()
            measured.step(chunks, chunks, took_s, chunks, 0.1 * step, context)
        found = measured.report(80.0, 80.0)
        assert found.context_token_s == pytest.approx(expected, rel=0.15, abs=1e-8)
        assert found.context_tokens == pytest.approx(4_000 if alike else 4_800, rel=0.1)
