"""The rewards of a run's samples: started as each group ends, collected when the trainer needs them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tailrace.app.calls.client import RolloutClient
from tailrace.app.train.rewards import Reward, RewardPool
from tailrace.app.train.task import Question
from tailrace.deployments.messages.rollout import GroupResult

NO_REWARD = 0.0
"""Value for the loss where a reward failed or was late."""


@dataclass
class RewardedStep:
    """Groups of a step with their rewards by question (step and place), outcomes, and seconds for which the trainer
    waited for them.
    """

    groups: dict[tuple[int, int], GroupResult] = field(default_factory=dict)
    values: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0


class StepRewards:
    """`question_of`: returns the question at a step and place. `decode`: returns the text of a completion's token
    ids.
    """

    def __init__(
        self,
        pool: RewardPool,
        client: RolloutClient,
        question_of: Callable[[int, int], Question],
        decode: Callable[[Sequence[int]], str],
    ):
        self._pool, self._client, self._question_of, self._decode = pool, client, question_of, decode
        self._begun: dict[tuple[int, int], tuple[GroupResult, list[Future[Reward]]]] = {}
        self._lock = threading.Lock()  # groups come on the threads of their steps
        self._rewarded = RewardedStep()

    def begin(self, group: GroupResult) -> None:
        """Starts the rewards of a group that has ended."""
        place = int(group.prompt_id)
        question = self._question_of(group.step, place)
        futures = [self._pool.submit(question, self._decode(sample.token_ids)) for sample in group.samples]
        with self._lock:
            self._begun[group.step, place] = group, futures

    def reward(self, prompts, completions, completion_ids, step, place, **columns) -> list[float]:
        """Returns the rewards of one group, as TRL's reward function: waits for them, and sends them to the service
        too.
        """
        started, asked = time.monotonic(), (step[0], place[0])
        with self._lock:
            group, futures = self._begun.pop(asked)
        rewards = [future.result() for future in futures]
        values = [NO_REWARD if reward.value is None else reward.value for reward in rewards]
        self._rewarded.waited_s += time.monotonic() - started
        self._client.record_rewards_blocking(group, values)
        self._rewarded.groups[asked], self._rewarded.values[asked] = group, values
        self._rewarded.outcomes.update(reward.outcome for reward in rewards)
        return values

    def longest(self, rewarded: RewardedStep) -> dict[str, int]:
        """Returns the tokens of the longest sample of each question, by its id."""
        return {
            self._question_of(*asked).question_id: max(len(sample.token_ids) for sample in group.samples)
            for asked, group in rewarded.groups.items()
        }

    def take(self) -> RewardedStep:
        """Returns all rewards since the last call."""
        taken, self._rewarded = self._rewarded, RewardedStep()
        return taken
