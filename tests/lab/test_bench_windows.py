"""Parts of `bench windows` that need no vLLM: ratios of rounds, flips, and its options."""

import numpy as np
import pytest

from tailrace.app.cli import run
from tailrace.lab.benchmarks.engine.canonical_windows import cost_ratios, flipped


def test_ratios_are_of_the_same_rounds():
    """The second round is slow for all engines, as on a busy machine."""
    assert cost_ratios({None: [1.0, 8.0, 1.0], 0: [1.5, 12.0, 9.0], 16: [1.1, 8.8, 1.1]}) == {"own": 1.5, "16": 1.1}


def test_tokens_after_a_difference_are_not_compared():
    one = [(np.arange(8), np.zeros(8))] * 3
    other = [one[0], (np.array([0, 1, 9, 9, 9, 9, 9, 9]), np.array([0, 1, 1, 1, 1, 1, 1, 1.0])), one[2]]
    assert flipped(one, other) == (1, 8 + 3 + 8, 2)
    assert flipped(one, one) == (0, 24, 0)


@pytest.mark.parametrize("option", ["--samples", "--windows"])
@pytest.mark.parametrize("value", ["", "0", "4,x", "1000"])
def test_other_numbers_are_refused(capsys, option, value):
    assert run(["bench", "windows", option, value]) == 2
    assert option in capsys.readouterr().err
