"""A driver whose rewards come at different speeds, over several steps at once, and are given back by sample.

Laws: each reward in the history belongs to the answer beside it, and in a run without faults none is lost. The reward
of an answer is a function of its tokens (`reward_of`), so the reward of another sample shows. Called by `run`.
"""

import asyncio
from random import Random

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import QuotaExceeded, RolloutRejected, WeightsRejected
from tailrace.deployments.messages.chunk import sample_key
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch, SampleResult
from tailrace.lab.fuzz.checks import Ledger, ResultChecks
from tailrace.lab.fuzz.chunks import reward_of
from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.policies.protocol.actions import SampleEnd

BEGINS_S, STEPS = 3.0, 4
SPEEDS_S = 0.0, 0.1, 1.0, 8.0
GROUPS, SAMPLES, TOKENS = 2, 2, 60
ORDER_S = 1.0
"""Seconds after an answer from which its reward must be kept: a reward given sooner may reach the history before the
answer."""

TAKEN_S = 4.0
"""Seconds until the history has a reward that was given."""


class SlowRewards:
    """The driver. `calm`: whether the run has no fault. `rng`: used here alone."""

    def __init__(self, cluster: SimulatedCluster, ledger: Ledger, rng: Random, calm: bool):
        self._cluster, self._ledger, self._rng, self._calm = cluster, ledger, rng, calm
        self.name, self.ended = "rewards", False
        self._checks = ResultChecks(cluster, ledger)
        self._now = asyncio.get_running_loop().time
        self._prompts = {
            f"q{number}": tuple(rng.randrange(1, 1000) for _ in range(rng.randrange(1, 40))) for number in range(GROUPS)
        }

    async def run(self) -> None:
        await asyncio.sleep(BEGINS_S)
        client, steps = driver_client(self._cluster), []
        try:
            for step in range(STEPS):
                steps.append(asyncio.ensure_future(self._step(client, step)))
                await asyncio.sleep(self._rng.choice((0.0, 1.0, 10.0)))
            await asyncio.gather(*steps)
        finally:
            for one in steps:
                one.cancel()
            await asyncio.gather(*steps, return_exceptions=True)
        await asyncio.sleep(TAKEN_S)
        self.ended = True

    async def _step(self, client: RolloutClient, step: int) -> None:
        groups = tuple(
            PromptGroup(prompt_id=name, token_ids=prompt, samples=SAMPLES, max_tokens=TOKENS)
            for name, prompt in self._prompts.items()
        )
        batch = RolloutBatch(batch_id=f"rewards-{step}", groups=groups, seed=3, step=step)
        for group in groups:
            for index in range(SAMPLES):
                key = sample_key(batch.seed, step, group.prompt_id, index)
                self._cluster.culprits.ask_again(key, group.token_ids)
        self._cluster.log_disk.begin(batch.batch_id)
        rewarding = []
        try:
            async for result in client.rollout(batch):
                group = next(one for one in groups if one.prompt_id == result.prompt_id)
                self._checks.check(batch, group, result)
                rewarding.append(asyncio.ensure_future(self._reward(client, result)))
        except (WeightsRejected, RolloutRejected) as error:
            if not isinstance(error, QuotaExceeded | WeightsRejected) and not self._ledger.policies_failed:
                raise
        await asyncio.gather(*rewarding)

    async def _reward(self, client: RolloutClient, result: GroupResult) -> None:
        """Computes the rewards of a group, and gives them back at once or one by one."""
        values: dict[int, float] = {}
        came_s = self._now()
        at_once = self._rng.random() < 0.5

        async def compute(sample: SampleResult) -> None:
            await asyncio.sleep(self._rng.choice(SPEEDS_S) * self._rng.random())
            value = reward_of(sample.token_ids)
            values[sample.sample_index] = value
            if not at_once:
                await self._give(client, result, {sample.sample_index: value}, came_s)

        await asyncio.gather(*map(compute, result.samples))
        if at_once:
            await self._give(client, result, [values[sample.sample_index] for sample in result.samples], came_s)

    async def _give(self, client: RolloutClient, result: GroupResult, rewards: dict | list, came_s: float) -> None:
        await client.record_rewards(result, rewards)
        given = dict(rewards) if isinstance(rewards, dict) else dict(enumerate(rewards))
        if self._calm and self._cluster.shards and self._now() > came_s + ORDER_S:
            rewarded = self._cluster.shards.rewarded.setdefault((result.prompt_key, result.step), set())
            ends = {one.sample_index: one.finish_reason for one in result.samples}
            rewarded.update(index for index in given if ends[index] in (SampleEnd.STOP, SampleEnd.LENGTH))
