"""Routed experts of a trainer's rows, found by their tokens."""

import numpy as np
import pytest

from tailrace.app.errors import Failed
from tailrace.app.trl.row_routes import RowRoutes
from tailrace.deployments.results.routed_experts import RoutedExperts


def routes(first: int, rows: int) -> RoutedExperts:
    return RoutedExperts(np.arange(first, first + rows, dtype=np.uint8).reshape(rows, 1, 1))


def test_rows_have_the_routes_of_their_samples_once():
    known = RowRoutes()
    known.add([1, 2], [3], routes(10, 2))
    known.add([1, 2], [4], None)
    known.add([5], [6], routes(20, 1))
    rows = [[5], [1, 2], [1, 2]], [[6], [3], [4]]
    assert known.take(*rows) == [routes(20, 1), routes(10, 2), None]
    assert known.take(*rows) == [None, None, None], "a step begins with none"


def test_equal_samples_have_theirs_in_the_order_of_the_trainer():
    known = RowRoutes()
    for first in (10, 20):
        known.add([1], [2, 3], routes(first, 2))
    assert known.take([[1], [1]], [[2, 3], [2, 3]]) == [routes(10, 2), routes(20, 2)]


def test_a_row_of_two_turns_has_those_of_the_second():
    known = RowRoutes()
    known.add([1], [2, 3], routes(10, 2))
    known.add([1, 2, 3, 8, 9], [4], routes(30, 5))
    assert known.take([[1]], [[2, 3, 8, 9, 4]]) == [routes(30, 5)]


def test_a_row_without_a_token_of_its_last_answer_has_those_of_the_prompt():
    """The trainer gives an answer no room after a result of a tool that has filled the row."""
    known = RowRoutes()
    known.add([1], [2], routes(10, 1))
    known.add([1, 2, 8], [9], routes(30, 3))
    assert known.take([[1]], [[2, 8]]) == [routes(30, 3)]
    known.add([1, 2, 8], [9, 9], routes(30, 4))
    assert known.take([[1]], [[2, 8]]) == [routes(30, 3)]


def test_routes_of_some_tokens_alone_are_refused():
    with pytest.raises(Failed, match="a sample of 4 tokens has 2 rows of routed experts, not one less"):
        RowRoutes().add([1, 2], [3, 4], routes(10, 2))
