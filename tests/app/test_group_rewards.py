"""Rewards and advantages of a group, as TRL computes them: by function, in the order of the samples."""

import asyncio
import inspect
import math
import sys
import threading
from types import ModuleType

import numpy as np
import pytest

from tailrace.app.errors import Failed
from tailrace.app.trl.group_rewards import EPSILON, GroupRewards, rewards_of

NAN = float("nan")


@pytest.fixture(autouse=True)
def _trl(monkeypatch):
    """In the place of TRL, which would be imported for two small functions."""
    utils = ModuleType("trl.trainer.utils")
    utils.get_callable_name = lambda function: function.__name__
    utils.is_async_callable = inspect.iscoroutinefunction
    for name, module in (("trl", ModuleType("trl")), ("trl.trainer", ModuleType("trainer")), (utils.__name__, utils)):
        monkeypatch.setitem(sys.modules, name, module)


def test_rewards_of_functions_are_added_and_a_sample_without_any_has_none():
    rewards = GroupRewards(("a", "b"), np.array([[1.0, NAN, NAN, 2.0], [0.5, NAN, 3.0, NAN]]))
    assert np.array_equal(rewards.totals, [1.5, NAN, 3.0, 2.0], equal_nan=True)


def test_advantages_are_of_the_scored_samples_alone():
    rewards = GroupRewards(("a",), np.array([[1.0, NAN, 4.0, 1.0]]))
    deviation = math.sqrt(2.0) + EPSILON
    assert rewards.advantages == pytest.approx([-1 / deviation, 0.0, 2 / deviation, -1 / deviation], abs=1e-12)
    assert list(GroupRewards(("a",), np.full((1, 3), NAN)).advantages) == [0.0, 0.0, 0.0]
    assert list(GroupRewards(("a",), np.ones((1, 3))).advantages) == [0.0, 0.0, 0.0], "all are as good"


def test_metrics_have_each_function_by_its_name():
    rewards = GroupRewards(("a", "b"), np.array([[1.0, 3.0], [0.5, NAN]]))
    first, second = rewards.metrics()
    assert first == {"reward": 1.5, "reward_std": 0.75, "rewards/a": 1.0, "rewards/b": 0.5}
    assert second == pytest.approx({"reward": 3.0, "reward_std": 0.75, "rewards/a": 3.0, "rewards/b": NAN}, nan_ok=True)
    (alone,) = GroupRewards(("a",), np.array([[NAN]])).metrics()
    assert all(math.isnan(value) for value in alone.values())
    with pytest.raises(ValueError):
        GroupRewards(("a",), np.zeros((2, 3))).metrics()


def lengths(completions, **_columns):
    assert threading.current_thread() is not threading.main_thread()
    return [len(completion) for completion in completions]


async def slow_first(completions, answer, **_columns):
    await asyncio.sleep(0)
    return [None if completion == answer else -1.0 for completion in completions]


def test_functions_of_both_kinds_give_a_row_each_in_their_order():
    columns = {"completions": ["a", "bb", "ccc"], "answer": "bb"}
    rewards = asyncio.run(rewards_of([slow_first, lengths], 3, columns))
    assert rewards.names == ("slow_first", "lengths")
    assert np.array_equal(rewards.by_function, [[-1.0, NAN, -1.0], [1.0, 2.0, 3.0]], equal_nan=True)


def broken(completions, **_columns):
    raise ValueError("first\nsecond")


@pytest.mark.parametrize(
    ("function", "samples", "said"),
    [
        (broken, 1, "the reward function broken has failed: ValueError: .*second"),
        (lengths, 2, "the reward function lengths gave 1 rewards for 2 samples"),
        (lengths, 0, "the reward function lengths gave 1 rewards for 0 samples"),
    ],
)
def test_a_function_that_fails_or_gives_another_number_is_named(function, samples, said):
    with pytest.raises(Failed, match=said) as caught:
        asyncio.run(rewards_of([function], samples, {"completions": ["a"]}))
    assert "\n" not in str(caught.value)
