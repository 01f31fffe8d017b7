"""Acceptance: the measured tables come out as they went in, evidence helps, and its rule is what was measured."""

import pytest

from tailrace.lab.simulator.acceptance import (
    HISTORY_SHARE,
    AcceptanceTable,
    BestOf,
    Measured,
    ModelledMethod,
    aimd_share,
    chance_for,
    expected_tokens,
)
from tailrace.lab.simulator.types import WorkloadGroup

AMC_TRACE = AcceptanceTable(
    table=(
        Measured(0, 0, 1.759), Measured(1, 0, 2.135), Measured(3, 0, 2.452), Measured(7, 0, 2.746),
        Measured(15, 0, 3.016), Measured(0, 8, 2.736), Measured(0, 16, 2.951), Measured(7, 16, 3.104),
    ),
)  # fmt: skip
"""Measured by `tailrace bench drafts` with this project's draft index: AMC-2023 rollouts at temperature 0.6."""


def group(answers=0, epochs=0, predictability=1.0) -> WorkloadGroup:
    return WorkloadGroup("g", 10, (100,) * 16, ((100,) * answers,) * epochs, predictability)


@pytest.mark.parametrize("row", AMC_TRACE.table)
def test_every_measurement_is_on_the_curve(row):
    history = group(answers=int(row.answers), epochs=1)
    chance = AMC_TRACE.chance(history, 0, 50, int(row.mates), 1)
    assert expected_tokens(chance, 8) == pytest.approx(row.tokens, rel=1e-6)


def test_a_past_answer_counts_as_a_share_of_a_mate():
    """The curve of mates alone foretells what was measured with history alone, and within 3 % with both."""
    mates = AcceptanceTable(tuple(row for row in AMC_TRACE.table if not row.answers))
    for row in AMC_TRACE.table:
        told = expected_tokens(mates.mean_chance(row.mates + HISTORY_SHARE * row.answers), 8)
        assert told == pytest.approx(row.tokens, rel=0.03 if row.mates and row.answers else 0.01)


def test_more_evidence_is_never_worse_and_nothing_is_claimed_beyond_it():
    chances = [AMC_TRACE.mean_chance(evidence / 4) for evidence in range(100)]
    assert chances == sorted(chances) and chances[-1] == AMC_TRACE.mean_chance(7 + HISTORY_SHARE * 16)
    known = [AMC_TRACE.chance(group(4, 3), 0, 0, 2, epochs) for epochs in range(4)]
    assert known == sorted(known) and len(set(known)) == 4


def test_a_groups_predictability_multiplies_the_odds():
    plain, better = (AMC_TRACE.chance(group(predictability=f), 0, 0, 3, 0) for f in (1.0, 2.0))
    assert better / (1 - better) == pytest.approx(2 * plain / (1 - plain))


@pytest.mark.parametrize("drafts", [1, 4, 32])
@pytest.mark.parametrize("chance", [0.01, 0.5, 0.99])
def test_expected_tokens_are_a_geometric_sum_and_its_inverse_finds_the_chance(chance, drafts):
    tokens = expected_tokens(chance, drafts)
    assert tokens == pytest.approx(1 + sum(chance**n for n in range(1, drafts + 1)))
    assert chance_for(tokens, drafts) == pytest.approx(chance)


def test_all_drafts_right_or_none():
    assert expected_tokens(1.0, 5) == 6 and expected_tokens(0.0, 5) == 1


@pytest.mark.parametrize("chance", [0.3, 0.8, 0.95])
def test_the_accepted_share_of_an_aimd_window_is_that_of_its_chain(chance):
    """Against the chain of windows, walked until it stands still."""
    windows = list(range(2, 34, 2))
    share = dict.fromkeys(windows, 1 / len(windows))
    for _ in range(600):
        moved = dict.fromkeys(windows, 0.0)
        for window, weight in share.items():
            moved[min(window + 2, 32)] += weight * chance**window
            moved[2] += weight * (1 - chance**window)
        share = moved
    right = sum(weight * (expected_tokens(chance, window) - 1) for window, weight in share.items())
    assert aimd_share(chance) == pytest.approx(right / sum(weight * window for window, weight in share.items()))


def test_the_best_of_several_methods_and_what_drafting_costs():
    weak, strong = (
        ModelledMethod(name, AcceptanceTable((Measured(0, 0, t),)), 2e-3, 1e-5) for name, t in (("a", 1.5), ("b", 2.5))
    )
    best = BestOf((weak, strong)).chance(group(), 0, 0, 0, 0)
    assert best == strong.acceptance.chance(group(), 0, 0, 0, 0) > weak.acceptance.chance(group(), 0, 0, 0, 0)
    assert strong.draft_s(100) == pytest.approx(3e-3)


@pytest.mark.parametrize("rows", [(), ((0, 2.0), (3, 1.9)), ((0, 9.5),), ((0, 1.0),)])
def test_a_table_that_cannot_be_is_refused(rows):
    with pytest.raises(ValueError, match=r"acceptance table|no chance"):
        AcceptanceTable(tuple(Measured(mates, 0, tokens) for mates, tokens in rows))
