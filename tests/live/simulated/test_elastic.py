"""Replicas that are given back and taken again, on the simulated cluster."""

import asyncio

from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch


def test_a_replica_that_is_given_back_is_no_loss_and_one_that_dies_is(play):
    groups = tuple(PromptGroup(prompt_id=f"p{n}", token_ids=(n + 1, 2), samples=4, max_tokens=90) for n in range(4))

    async def story(cluster, client):
        faults = cluster.coordinator.rollouts.totals.faults
        async for _ in client.rollout(RolloutBatch(batch_id="b", groups=groups)):
            pass
        while len((await client.status()).replicas) > 1:
            await asyncio.sleep(1.0)
        assert faults["replica_lost"] == 0
        cluster.kill(next(iter(cluster.replicas)))
        await asyncio.sleep(60.0)
        assert faults["replica_lost"] == 1

    play(story, limits=(1, 2), mean_tokens=60, policies={"tail": {"type": "release", "after_s": 0.0}})
