"""Outliers of `histo_pipe` on the simulated cluster: the coordinator moves them, and tokens do not change."""

import asyncio

from simulated.test_pause import BATCH

RULE = {"type": "histo_pipe", "migrate": True, "last_share": 1.0, "ranking_groups": 3}
POLICIES = {"ordering": RULE, "chunking": {"type": "fixed", "chunk_tokens": None}}


async def made(client, step: int, seed: int) -> dict:
    batch = BATCH.model_copy(update={"batch_id": f"s{step}-{seed}", "step": step, "seed": seed})
    return {group.prompt_id: [one.token_ids for one in group.samples] async for group in client.rollout(batch)}


def test_outliers_move_and_make_the_tokens_that_they_would_have_made(play):
    found = {}

    def of(name: str, policies: dict) -> None:
        async def story(cluster, client):
            found[name] = [await made(client, 1, 1)]
            found[name] += await asyncio.gather(*(made(client, step, step) for step in (2, 3, 4)))
            found[name, "moves"] = dict(cluster.coordinator.rollouts.core.outliers.moves)

        play(story, replicas=3, policies=policies)

    of("moving", POLICIES)
    of("still", POLICIES | {"ordering": "histo_pipe"})
    assert found["moving"] == found["still"]
    assert sum(found["moving", "moves"].values()) > 0 == sum(found["still", "moves"].values())
