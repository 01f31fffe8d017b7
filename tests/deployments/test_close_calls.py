"""Counts of margins, and the flips that are expected of them: against a simulation of draws and noise."""

from collections import Counter

import numpy as np
import pytest

from tailrace.deployments.messages.close_calls import (
    DENSITY_BELOW,
    EDGES,
    count_margins,
    density,
    expected_flips_per_million,
    key_of,
)
from tailrace.deployments.messages.rollout import GroupResult, SampleResult
from tailrace.lab.verification.closeness import noise_of, sentences, sureness


def test_margins_are_counted_below_each_edge():
    counts = count_margins(np.array([np.inf, 0.0, 2e-6, 0.02, 0.5], np.float32))
    assert counts["draws"] == 5 and counts[key_of(EDGES[0])] == 1
    assert counts[key_of(1e-5)] == 2 and counts[key_of(DENSITY_BELOW)] == 2 and counts[key_of(EDGES[-1])] == 3
    assert [counts[key_of(edge)] for edge in EDGES] == sorted(counts[key_of(edge)] for edge in EDGES)
    assert count_margins(np.empty(0, np.float32))["draws"] == 0


def test_no_draws_have_no_density():
    assert density({}) == 0.0 and expected_flips_per_million(2.0, np.empty(0)) == 0.0


@pytest.mark.parametrize("redrawn_below", [0.0, 0.004])
def test_expected_flips_are_those_of_a_simulation(redrawn_below):
    rng = np.random.default_rng(1)
    margins, noise = rng.exponential(1.0, 4_000_000), 0.004 * rng.standard_normal(4_000_000)
    flipped = (margins + noise < 0) & (margins >= redrawn_below)
    expected = expected_flips_per_million(density(count_margins(margins)), np.abs(noise[:10_000]), redrawn_below)
    assert expected == pytest.approx(1e6 * flipped.mean(), rel=0.1)


def test_noise_below_the_tolerance_flips_nothing_that_is_redrawn():
    noise = np.array([1e-5, 3e-5])
    assert expected_flips_per_million(1.0, noise) == pytest.approx(10.0)
    assert expected_flips_per_million(1.0, noise, 3e-5) == 0.0


def rollout(tokens, raw_logprobs, close_calls=()):
    sample = SampleResult(
        sample_index=0, token_ids=tokens, text="", logprobs=raw_logprobs, raw_logprobs=raw_logprobs,
        finish_reason="stop", close_calls=close_calls,
    )  # fmt: skip
    return [GroupResult(batch_id="b", prompt_id="p", prompt_token_ids=(1,), samples=(sample,))]


def test_noise_is_of_the_tokens_before_the_first_difference():
    a, b = rollout((1, 2, 3), (-1.0, -2.0, -3.0)), rollout((1, 2, 4), (-1.5, -2.0, -9.0))
    assert noise_of(a, b) == pytest.approx([0.5 * 2**0.5, 0.0])
    assert len(noise_of(a, [])) == 0


def test_the_certificate_says_how_sure_equality_is():
    runs = [rollout((1, 2), (-1.0, -2.0), (1,)), rollout((1, 2), (-1.0, -2.0 - 1e-5), (1,))]
    work = Counter({"draws": 1000, key_of(DENSITY_BELOW): 10, "redraws": 2, "redraws_changed": 1, "redraw_us": 500_000})
    result = sureness(runs, [work, Counter()], tolerance=1e-3)
    assert result["close_calls"] == 2 and result["close_calls_per_million"] == 5e5
    flips = result["expected_flips_per_million"]
    assert (
        flips["without_redraws"] == pytest.approx(1e6 * 1e-5 * 2**0.5 / 2 / 2, rel=1e-3) and not flips["with_redraws"]
    )
    assert result["noise"]["max"] == pytest.approx(1e-5 * 2**0.5, rel=1e-3)
    assert (result["redraws"], result["redraws_changed"], result["redraw_seconds"]) == (2, 1, 0.5)
    assert "2 redraws took 0.5 s, 0.250 s each, and changed 1 tokens" in sentences(result)
    assert len(sentences(sureness(runs, [], 1e-3))) == 3


def test_the_noise_of_a_run_with_an_adapter_is_beside_one_with_it():
    plain, adapted = (rollout((1, 2), (-1.0, logprob)) for logprob in (-2.0, -1.5))
    runs = [plain, adapted, rollout((1, 2), (-1.0, -1.5 - 1e-5))]
    result = sureness(runs, [], 1e-3, references=[plain, adapted, adapted])
    assert result["noise"]["max"] == pytest.approx(1e-5 * 2**0.5, rel=1e-3)
