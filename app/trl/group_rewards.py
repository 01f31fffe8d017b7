"""Rewards and advantages of one group, as TRL's asynchronous worker computes them.

Upstream symbol: `_AsyncRolloutLoop._score_group` of trl/experimental/async_grpo/async_rollout_worker.py; a test
compares. Rewards of several functions are added. A sample without any has the advantage 0.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.app.errors import Failed
from tailrace.deployments.messages.errors import one_line

EPSILON = 1e-8
"""Added to the standard deviation: TRL's value."""


@dataclass(frozen=True)
class GroupRewards:
    """`by_function`: shape [functions, samples]; NaN where a function returns none. `totals`: shape [samples]."""

    names: tuple[str, ...]
    by_function: np.ndarray

    @property
    def totals(self) -> np.ndarray:
        none = np.all(np.isnan(self.by_function), axis=0)
        return np.where(none, np.nan, np.nansum(self.by_function, axis=0))

    @property
    def advantages(self) -> np.ndarray:
        """Returns the advantages, shape [samples]: (total - mean) / (population standard deviation + EPSILON)."""
        totals = self.totals
        scored = ~np.isnan(totals)
        found = np.zeros_like(totals)
        if scored.any():
            found[scored] = (totals[scored] - totals[scored].mean()) / (totals[scored].std() + EPSILON)
        return found

    def metrics(self) -> list[dict[str, float]]:
        """Returns TRL's names and values for each sample."""
        totals = self.totals
        deviation = float(np.nanstd(totals)) if not np.isnan(totals).all() else float("nan")
        return [
            {"reward": float(totals[index]), "reward_std": deviation}
            | {f"rewards/{name}": float(row[index]) for name, row in zip(self.names, self.by_function, strict=True)}
            for index in range(len(totals))
        ]


async def rewards_of(functions: Sequence[Callable], samples: int, columns: dict[str, list[Any]]) -> GroupRewards:
    """Calls reward functions of TRL's signature; those that are no coroutines run in threads.

    `columns`: prompts, completions, completion_ids and the data set's, one value for each sample. Raises Failed with
    the function's name if one raises, or returns a wrong number of rewards.
    """
    from trl.trainer.utils import get_callable_name, is_async_callable

    async def called(function: Callable) -> list[float]:
        name = get_callable_name(function)
        try:
            if is_async_callable(function):
                found = await function(**columns)
            else:
                found = await asyncio.to_thread(function, **columns)
            found = [float("nan") if each is None else float(each) for each in found]
        except Exception as error:  # any error of a user's function
            raise Failed(f"the reward function {name} has failed: {one_line(error)}") from error
        if len(found) != samples:
            raise Failed(f"the reward function {name} gave {len(found)} rewards for {samples} samples")
        return found

    rows = await asyncio.gather(*map(called, functions))
    return GroupRewards(tuple(map(get_callable_name, functions)), np.array(rows, dtype=float))
