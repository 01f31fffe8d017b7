"""The phrase table: counts of followers by context, which never grow beyond their rows."""

import numpy as np
import pytest

from tailrace.deployments.draft_index.phrase_kernels import (
    COLUMNS,
    COUNT,
    FADED,
    FOLLOWERS,
    ORDERS,
    TOTAL,
    note,
    recall,
)

SIZE = 1 << 12


def text(*tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def recalled(table, context: np.ndarray) -> dict[int, list[float]]:
    """Counts of each follower of a context, by order."""
    tokens, heard = np.zeros(96, np.int32), np.zeros((97, ORDERS), np.float32)
    sums, runs, keys = np.zeros((96, 25), np.float32), np.zeros((96, 3), np.uint64), np.zeros(ORDERS, np.uint64)
    many = recall(table, context, len(context), 0, tokens, sums, runs, heard, keys)
    return dict(zip(tokens[:many].tolist(), heard[:many].tolist(), strict=True)) | {-1: heard[-1].tolist()}


@pytest.fixture
def table():
    return np.zeros((SIZE, COLUMNS), np.int32)


def test_followers_are_counted_by_the_length_of_their_context(table):
    for _ in range(3):
        note(table, text(1, 2, 3, 4, 5))
    note(table, text(9, 9, 9, 4, 6))
    assert recalled(table, text(1, 2, 3, 4)) == {5: [3, 3, 3], 6: [1, 0, 0], -1: [4, 3, 3]}
    assert recalled(table, text(4)) == {5: [3, 0, 0], 6: [1, 0, 0], -1: [4, 0, 0]}
    assert recalled(table, text(77, 78)) == {-1: [0, 0, 0]}


def test_a_frequent_follower_outlives_many_that_came_once(table):
    for other in range(100, 160):
        note(table, text(1, 2))
        note(table, text(1, other))
    found = recalled(table, text(1))
    assert found[2][0] > 50 and len(found) <= 1 + FOLLOWERS


def test_counts_fade_and_follow_a_model_that_changes(table):
    for _ in range(2 * FADED):
        note(table, text(1, 2))
    assert table[:, TOTAL].max() < FADED
    for _ in range(FADED):
        note(table, text(1, 3))
    assert recalled(table, text(1))[3][0] > recalled(table, text(1))[2][0]


def test_a_full_table_stays_whole():
    table, rng = np.zeros((64, COLUMNS), np.int32), np.random.default_rng(0)
    told = rng.integers(0, 1000, 20_000).astype(np.int32)
    note(table, told)
    assert (table[:, COUNT:] >= 0).all() and np.isin(table[:, COUNT - FOLLOWERS : COUNT], np.append(told, 0)).all()
    assert (table[:, COUNT:].sum(axis=1) <= table[:, TOTAL]).all()
