"""A draft model beside the engine that verifies: the same tokens in every way, also when it is killed; waste counted.

The models are those of cut_models.py.
"""

import asyncio

import numpy as np
import pytest
import ray
from live.drafter.cut_models import WINDOW, drafter_of, engine_of
from ray import serve

from tailrace.app.calls.client import RolloutClient
from tailrace.app.files.prompts import read_prompts
from tailrace.deployments.coordinator.journal import read_journal, replay
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.lab.benchmarks.drafting.decoupled import measure
from tailrace.lab.demo import PROMPTS
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.events import ChunkFinished

TURNS = 8
"""Samples that do not wait are drafted for only while the draft model is the faster one; tried so often at most."""


@pytest.mark.long
def test_coupled_decoupled_and_with_other_noise_the_tokens_are_the_same_and_the_waste_is_bounded(models):
    target, drafter = models
    prompts = [np.arange(1000 + 50 * i, 1020 + 50 * i, dtype=np.int32) for i in range(3)]
    result = measure(engine_of(target), drafter_of(drafter), prompts, 32, print)
    assert result["same_tokens"]
    for name, run in result["runs"].items():
        if name != "plain":
            assert run["most_wasted"] <= run["may_waste"], name
        if name.startswith("coupled"):
            assert run["drafted"] > 0 and run["rejections"] > 0, name
    coupled, other = result["runs"]["coupled"], result["runs"]["coupled, other noise"]
    assert coupled["acceptance"] > other["acceptance"], "at temperature 1 the sample's own noise is what agrees"
    assert coupled["accepted"] > 0


async def roll(client: RolloutClient, name: str, drafting, meanwhile=None, models="as_configured"):
    """Token ids of every sample, and tokens drafted by the draft model."""
    chunking = {"type": "fixed", "chunk_tokens": 48}
    await client.set_policies(Policies(chunking=chunking, drafting=drafting, draft_models=models))
    groups = tuple(read_prompts(PROMPTS, {"samples": 2, "max_tokens": 96}))[:3]
    batch = RolloutBatch(batch_id=name, groups=groups)
    task = asyncio.create_task(meanwhile(client, name)) if meanwhile else None
    done = {group.prompt_id: group.samples async for group in client.rollout(batch)}
    if task:
        await task
    samples = [sample for prompt_id in sorted(done) for sample in done[prompt_id]]
    return [s.token_ids for s in samples], sum(s.drafted_by_source.get("model", 0) for s in samples)


@pytest.fixture(scope="module")
def expected(client) -> list:
    """Without drafts."""
    tokens, drafted = asyncio.run(asyncio.wait_for(roll(client, "plain", "off"), 900))
    assert not drafted
    return tokens


async def kill_the_drafter(client: RolloutClient, batch_id: str) -> None:
    """In mid-rollout."""
    while not any(batch.tokens > 20 for batch in (await client.status()).batches if batch.batch_id == batch_id):
        await asyncio.sleep(0.05)
    (name,) = [n["name"] for n in ray.util.list_named_actors(all_namespaces=True) if "#Drafter#" in n["name"]]
    ray.kill(ray.get_actor(name, namespace="serve"))


async def drafting_again(client: RolloutClient, expected) -> int:
    """Tokens drafted by a draft model, once Serve has replaced the killed one; until then nobody drafts."""
    turn = drafted = 0
    while not drafted:
        turn += 1
        tokens, drafted = await roll(client, f"again-{turn}", {"type": "fixed", "tokens": 8})
        assert tokens == expected
    return drafted


def test_chunks_are_drafted_as_the_planner_says_and_it_hears_what_came_of_it(client, expected):
    """By figures of a fast drafter, then of one that is too slow for all; no token changes."""
    fixed, planned = {"type": "fixed", "tokens": 8}, {"type": "planned", "acceptance": 0.9, "max_window": WINDOW}
    costs = {"verifier": {"base_s": 0.1}, "drafter": {"base_s": 0.005}}  # measured ones differ from machine to machine

    async def work():
        for turn in range(TURNS):
            await client.journal(True)
            fast, drafted = await roll(client, f"fast-{turn}", fixed, models=planned | costs)
            journal = read_journal((await client.journal(False)).splitlines())
            assert fast == expected and replay(journal) is None
            if drafted and len(ways_of(journal)[1]) > 1:
                break
        slow, none = await roll(client, "slow", fixed, models=planned | {"drafter": {"base_s": 1.0}})
        assert slow == expected and none == 0 < drafted
        return journal

    journal = asyncio.run(asyncio.wait_for(work(), 900))
    first, all_ways = ways_of(journal)
    ended = [entry for entry in journal.entries if isinstance(entry, ChunkFinished)]
    assert len(first) == 1 and min(first).window > 0
    assert first < all_ways, "those that accept less are drafted otherwise"
    assert sum(one.model_tested for one in ended) > sum(one.model_accepted for one in ended) > 0


def ways_of(journal) -> tuple[set, set]:
    """How the first chunks of samples are drafted, and how all are."""
    actions = [action for entry in journal.entries for action in getattr(entry, "actions", ())]
    starts = [action for action in actions if isinstance(action, StartChunk)]
    return {start.way for start in starts if not start.start}, {start.way for start in starts}


@pytest.mark.long
def test_a_drafter_that_is_killed_takes_no_token_with_it_and_comes_back(client, expected):
    async def work():
        fixed = {"type": "fixed", "tokens": 8}
        tokens, drafted = await roll(client, "drafted", fixed)
        assert tokens == expected and drafted > 0
        counts = await serve.get_deployment_handle("Drafter", "tailrace").stats.remote()
        wasted = {int(key.partition(".")[2]) for key in counts if key.startswith("wasted.")}
        assert counts["rejections"] > 0 and max(wasted) <= 2 * WINDOW - 1
        assert counts["rejections"] == sum(n for key, n in counts.items() if key.startswith("wasted."))
        tokens, _ = await roll(client, "killed", fixed, kill_the_drafter)
        assert tokens == expected
        assert await drafting_again(client, expected) > 0

    asyncio.run(asyncio.wait_for(work(), 900))
