"""What a step costs is learned from the steps that were seen, never falls, and follows the machine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.policies.models.step_cost_estimator import EVERY, PAIRED, StepCostEstimator, rising


def test_nothing_is_known_before_two_sizes_were_seen():
    times = StepCostEstimator()
    assert times.cost() is None
    times.record(1, 0.02)
    assert times.cost() is None
    times.record(16, 0.04)
    assert times.cost().at([1, 16]).tolist() == pytest.approx([0.02, 0.04])


def test_the_table_follows_a_machine_that_slows_down():
    times = StepCostEstimator()
    for _ in range(EVERY):
        times.record(1, 0.02)
        times.record(8, 0.03)
    for _ in range(20 * EVERY):
        times.record(1, 0.04)
        times.record(8, 0.06)
    assert times.cost().at([1, 8]).tolist() == pytest.approx([0.04, 0.06], rel=0.02)


def test_steps_larger_than_any_size_are_filed_under_the_largest():
    times = StepCostEstimator()
    times.record(1, 0.02)
    times.record(100_000, 5.0)
    assert times.cost().at(100_000) == pytest.approx(5.0)


@given(st.lists(st.tuples(st.floats(0.001, 10), st.floats(0.1, 10)), min_size=1, max_size=20))
def test_the_nearest_rising_sequence(pairs):
    values, weights = np.array(pairs).T
    made = rising(values, weights)
    assert (np.diff(made) >= -1e-12).all()
    assert np.average(made, weights=weights) == pytest.approx(np.average(values, weights=weights))
    if (np.diff(values) > 0).all():
        assert made.tolist() == values.tolist()
    again = rising(made, weights)
    assert again.tolist() == pytest.approx(made.tolist())


def test_a_chunk_s_own_seconds_are_found_where_steps_of_as_many_tokens_had_other_numbers_of_chunks():
    """A step takes 10 ms, 1 ms a token and 2 ms a chunk; drafts change what its tokens are of."""
    times = StepCostEstimator()
    for turn in range(2_000):
        chunks = (2, 8, 32)[turn % 3]
        tokens = chunks * (1, 4, 2)[turn // 3 % 3]
        times.record(tokens, 0.01 + 0.001 * tokens + 0.002 * chunks, chunks)
    chunk_s = times.table()[2]
    assert 0.5 * 0.002 < chunk_s <= 0.0021 and PAIRED < 100
    assert float(times.cost(8).at(32)) == pytest.approx(0.01 + 0.032 + 0.016, rel=0.1)
    assert float(times.cost(8).at(16)) < float(times.cost(16).at(16))


def test_without_drafts_all_seconds_are_of_tokens():
    times = StepCostEstimator()
    for turn in range(200):
        chunks = 1 + turn % 8
        times.record(chunks, 0.01 + 0.003 * chunks, chunks)
    assert times.table()[2] == 0.0 and times.cost(4) == times.cost(4)
    assert float(times.cost(8).at(8)) == pytest.approx(0.034)
