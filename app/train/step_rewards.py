"""The rewards of a step: begun as each group ends, collected when TRL asks for them."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from tailrace.app.client import RolloutClient
from tailrace.app.train.rewards import Reward, RewardPool
from tailrace.app.train.task import Question
from tailrace.deployments.messages.rollout import GroupResult, SampleResult

NO_REWARD = 0.0
"""Value for the loss where a reward failed or was late."""


@dataclass
class Rewarded:
    """Samples of a step with the outcomes of their rewards; seconds waited for these after the rollout."""

    samples: list[SampleResult] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    waited_s: float = 0.0


class StepRewards:
    """`decode`: text of a completion's token ids."""

    def __init__(self, pool: RewardPool, client: RolloutClient, decode: Callable[[Sequence[int]], str]):
        self._pool, self._client, self._decode = pool, client, decode
        self._questions: dict[tuple[int, ...], Question] = {}
        self._begun: list[tuple[GroupResult, list[Future[Reward]]]] = []
        self._rewarded = Rewarded()

    def know(self, questions: dict[tuple[int, ...], Question]) -> None:
        """`questions`: by the token ids of their prompts."""
        self._questions = questions

    def begin(self, group: GroupResult) -> None:
        """Start the rewards of a group that has ended."""
        question = self._questions[group.prompt_token_ids]
        texts = [self._decode(sample.token_ids) for sample in group.samples]
        self._begun.append((group, [self._pool.submit(question, text) for text in texts]))

    def reward(self, prompts, completions, completion_ids, **columns) -> list[float]:
        """TRL's reward function: waits for rewards that are not there yet, and gives them to the service too."""
        started = time.monotonic()
        found: dict[tuple[str, tuple[int, ...]], float] = {}
        for group, futures in self._begun:
            rewards = [future.result() for future in futures]
            values = [NO_REWARD if reward.value is None else reward.value for reward in rewards]
            question_id = self._questions[group.prompt_token_ids].question_id
            found |= {(question_id, each.token_ids): value for each, value in zip(group.samples, values, strict=True)}
            self._client.record_rewards_blocking(group, values)
            self._rewarded.samples += group.samples
            self._rewarded.outcomes.update(reward.outcome for reward in rewards)
        self._begun = []
        self._rewarded.waited_s += time.monotonic() - started
        return [found[name, tuple(ids)] for name, ids in zip(columns["question_id"], completion_ids, strict=True)]

    def take(self) -> Rewarded:
        """All since the last call."""
        taken, self._rewarded = self._rewarded, Rewarded()
        return taken
