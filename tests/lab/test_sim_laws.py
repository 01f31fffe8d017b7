"""Length laws: what is drawn follows the law, depends on its own name alone, and the law is found again in it."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from law_fit import fit, rank_stability

from tailrace.lab.simulator.laws import Law, draw, draw_steps, solve

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "amc23.jsonl.gz"
LAW = Law(4000, 0.8, 16384, within=0.4, persist=0.8, at_cap=0.05, predictability_spread=0.3)


def all_lengths(groups) -> np.ndarray:
    return np.array([group.lengths for group in groups])


@pytest.mark.parametrize(("within", "persist"), [(0.0, 0.0), (0.4, 0.8), (1.0, 1.0)])
def test_lengths_follow_the_law_whatever_is_correlated(within, persist):
    law = Law(4000, 0.8, 16384, within, persist, at_cap=0.05)
    lengths = all_lengths(draw(law, 1500, 2, 0, seed=0)).ravel()
    assert lengths.min() >= 1 and lengths.max() == 16384
    assert (lengths == 16384).mean() == pytest.approx(0.05, abs=0.015)
    assert lengths.mean() == pytest.approx(law.mean(), rel=0.04)
    for share in (0.1, 0.5, 0.9):
        assert (lengths <= law.quantile(share)).mean() == pytest.approx(share, abs=0.03)
        assert law.share_within(law.quantile(share)) == pytest.approx(share)


def test_more_of_anything_changes_nothing_of_what_was_drawn():
    few = draw(LAW, groups=3, samples=4, epochs=1, seed=7)
    more = draw(LAW, groups=9, samples=6, epochs=3, seed=7)
    for a, b in zip(few, more, strict=False):
        assert b.lengths[:4] == a.lengths and b.past_lengths[0][:4] == a.past_lengths[0]
        assert (b.group_id, b.predictability) == (a.group_id, a.predictability)
    later = draw_steps(LAW, 3, 4, steps=5, drift=0.0, seed=7)
    assert later[0] == few
    assert draw(LAW, 3, 4, 1, seed=7) == few != draw(LAW, 3, 4, 1, seed=8)


def test_each_step_knows_the_steps_before_it_newest_first():
    steps = draw_steps(LAW, 5, 4, steps=4, drift=0.05, seed=1, epochs=2, prompt_tokens=9)
    for number in (2, 3):
        for groups in zip(*steps, strict=True):
            assert groups[number].past_lengths == (groups[number - 1].lengths, groups[number - 2].lengths)
    assert all(group.prompt_tokens == 9 and len(group.past_lengths) == 2 for step in steps for group in step)


def test_drift_lengthens_every_step_by_as_much():
    law = Law(1000, 0.5, 10**6, within=0.5, persist=1.0)
    steps = draw_steps(law, 300, 8, steps=3, drift=0.2, seed=0)
    medians = [np.median(all_lengths(groups)) for groups in steps]
    assert np.diff(np.log(medians)) == pytest.approx([0.2, 0.2], abs=0.05)


def test_a_law_is_found_again_in_what_it_draws():
    law = Law(60000, 1.2, 98304, within=0.4, persist=0.8, at_cap=0.04)
    groups = draw(law, 250, 16, 2, seed=1)
    found = fit({group.group_id: [*group.past_lengths[::-1], group.lengths] for group in groups}, law.max_tokens)
    assert found.distance < 0.02
    assert found.law.within == pytest.approx(law.within, abs=0.05)
    assert found.law.persist == pytest.approx(law.persist, abs=0.06)
    assert found.law.at_cap == pytest.approx(law.at_cap, abs=0.02)
    for name, value in found.measured.items():
        assert found.modelled[name] == pytest.approx(value, rel=0.1), name


@pytest.mark.skipif(not TRACE.exists(), reason="shared/traces/amc23.jsonl.gz is not there")
def test_the_trace_fits_a_law():
    """Four characters counted as a token: what the law says of real answers does not hang on the tokenizer."""
    with gzip.open(TRACE, "rt") as lines:
        prompts = [json.loads(line) for line in lines]
    lengths = {
        str(prompt["prompt_id"]): [[1 + len(s["text"]) // 4 for s in epoch["samples"]] for epoch in prompt["epochs"]]
        for prompt in prompts
    }
    found = fit(lengths, max_tokens=2048)
    assert found.distance < 0.08
    for name in ("mean_tokens", "p10_tokens", "p50_tokens", "p90_tokens", "between_share", "rank_stability"):
        assert found.modelled[name] == pytest.approx(found.measured[name], rel=0.1), name


@pytest.mark.parametrize(
    "figures",
    [
        {"mean_tokens": 22000, "quantiles": {0.0003: 500}},
        {"mean_tokens": 3000, "spread": 0.6},
        {"quantiles": {0.28: 6554, 0.87: 11469}, "at_cap": 0.03},
        {"quantiles": {0.75: 4000}, "spread": 0.5},
    ],
)
def test_a_solved_law_has_the_published_figures(figures):
    at_cap = figures.get("at_cap", 0.0)
    law = Law(*solve(65536, **figures), 65536, 0.5, 0.5, at_cap)
    assert law.mean() == pytest.approx(figures.get("mean_tokens", law.mean()))
    assert law.spread == figures.get("spread", law.spread)
    for share, tokens in figures.get("quantiles", {}).items():
        assert law.quantile(share) == pytest.approx(tokens)


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"mean_tokens": 100},
        {"spread": 0.5},
        {"mean_tokens": 100, "spread": 1, "quantiles": {0.1: 5}},
        {"mean_tokens": 2000, "spread": 0.5},  # more than max_tokens
        {"quantiles": {0.1: 500, 0.9: 400}},  # falls
    ],
)
def test_figures_that_no_law_has_are_refused(figures):
    with pytest.raises(ValueError, match="law"):
        solve(1000, **figures)


@pytest.mark.parametrize("wrong", [{"within": 1.5}, {"persist": -0.1}, {"at_cap": 1.0}, {"spread": 0.0}])
def test_a_law_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="law"):
        Law(**{"median_tokens": 10, "spread": 1, "max_tokens": 100, "within": 0.5, "persist": 0.5, **wrong})


def test_ranks_hold_where_history_tells_and_not_where_it_does_not():
    """RhymeRL 6.1's figure: all answers where prompts repeat themselves; (r + 1) / 2 r of them by chance."""
    told = draw(Law(1000, 0.8, 10**6, within=0.0, persist=1.0), 400, 4, 1, seed=0)
    chance = draw(Law(1000, 0.8, 10**6, within=1.0, persist=0.0), 400, 4, 1, seed=0)
    stability = [
        rank_stability([group.past_lengths[0] for group in groups], all_lengths(groups), 8) for groups in (told, chance)
    ]
    assert stability[0] > 0.99 and stability[1] == pytest.approx(9 / 16, abs=0.03)
