"""Rewards of samples, computed in separate processes with a time limit each.

Invariant: a reward that raises, hangs, kills its process or is no number has its own outcome and is counted; it does
not affect the others. Pool by `pebble`, whose processes are ended when their time is over.
"""

import math
import re
import time
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context

from tailrace.app.errors import BadInput
from tailrace.app.train.task import Question, TaskConfig
from tailrace.deployments.messages.errors import one_line


@dataclass(frozen=True)
class Reward:
    """`outcome`: ok, failed or timed_out; `value` is None unless it is ok. `seconds`: includes the wait for a
    process.
    """

    value: float | None
    outcome: str
    error: str | None = None
    seconds: float = 0.0


class RewardPool:
    """`timeout_s`: seconds for one reward, from its start. Raises BadInput if the reward function cannot be
    imported.
    """

    def __init__(self, task: TaskConfig, workers: int, timeout_s: float):
        from pebble import ProcessPool

        if task.reward != "task":
            reward_function(task.reward)
        self._task, self._timeout_s = task, timeout_s
        self._pool = ProcessPool(max_workers=workers, context=get_context("spawn"))
        self.counts: Counter[str] = Counter()

    def submit(self, question: Question, completion: str) -> "Future[Reward]":
        """Returns the future reward of a completion. The future itself never raises."""
        reward: Future[Reward] = Future()
        started = time.monotonic()
        computed = self._pool.schedule(score, args=(self._task, question, completion), timeout=self._timeout_s)

        def ended(computed: Future) -> None:
            seconds = time.monotonic() - started
            try:
                found = _outcome(computed, self._timeout_s, seconds)
            except BaseException as error:  # noqa: BLE001 - the user's: an integer beyond floats, or a repr that raises
                fault = f"a reward is a finite number; reading it raised {type(error).__name__}"
                found = Reward(None, "failed", fault, seconds)
            self.counts[found.outcome] += 1
            reward.set_result(found)

        computed.add_done_callback(ended)
        return reward

    def close(self) -> None:
        """Ends the processes, also those that still compute."""
        self._pool.stop()
        self._pool.join()


def _outcome(computed: Future, timeout_s: float, seconds: float) -> Reward:
    try:
        value = computed.result()
    except LateError:
        return Reward(None, "timed_out", f"no reward within {timeout_s} s", seconds)
    except BaseException as error:  # noqa: BLE001 - an error of the user's function, or the end of its process
        return Reward(None, "failed", one_line(error), seconds)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return Reward(float(value), "ok", seconds=seconds)
    return Reward(None, "failed", f"a reward is a finite number, not {value!r}"[:200], seconds)


def reward_function(path: str):
    """Returns the function that `package.module:function` names. Raises BadInput."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name) if name else None
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"task.reward: {path}: {one_line(error)}") from error
    if not callable(found):
        raise BadInput(f"task.reward: {path} is no function; write package.module:function")
    return found


def score(task: TaskConfig, question: Question, completion: str) -> object:
    """Returns the reward of one completion. Runs in a process of the pool."""
    if task.reward != "task":
        return reward_function(task.reward)(question.prompt, completion, question.answer)
    answer = answer_in(completion, task.answer_pattern)
    if question.entry is not None:
        return _scorer(task.name).score_answer(answer, question.entry)
    return float(answer is not None and answer == question.answer)


def answer_in(completion: str, pattern: str | None) -> str | None:
    """Returns the answer in a completion: the pattern's last match, or the whole text; None if nothing matches."""
    if pattern is None:
        return completion.strip()
    found = list(re.finditer(pattern, completion))
    return (found[-1][1] if found[-1].re.groups else found[-1][0]) if found else None


@cache
def _scorer(name: str):
    """Returns a data set of one item: it scores answers to the items of any other."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0)
