"""The service with its pool: moved samples pull their KV, an update makes KV fresh, and nothing is left behind.

The last of the folder: it ends under other weights.
"""

import asyncio
import itertools
import time

import pytest

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import WeightsRejected
from tailrace.app.files.prompts import read_prompts
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.lab.demo import PROMPTS
from tailrace.lab.verification.disturbances import kill_a_replica
from tailrace.lab.verification.weights_update import crossing, first_chunks
from tailrace.policies.families.registry import Policies

WAIT_S = 120.0
"""What a save has begun and not ended is kept for a minute."""

LONG_TOKENS = 400
"""Samples in whose middle something is done: they are under way for hundreds of steps, also if the driver has to wait
for a core."""


@pytest.fixture(scope="module", autouse=True)
def nothing_to_draft_from(client):
    """The tests before this file have answered the same prompts."""
    run(client.forget_history())


def batch(name: str, samples: int = 2, max_tokens: int = 96, **more) -> RolloutBatch:
    groups = tuple(read_prompts(PROMPTS, {"samples": samples, "max_tokens": max_tokens}))[:6]
    return RolloutBatch(batch_id=name, groups=groups, **more)


def moving(**more) -> Policies:
    return Policies(placement="round_robin", chunking={"type": "fixed", "chunk_tokens": 24}, **more)


def run(work):
    """A test that waits for ever says nothing."""
    return asyncio.run(asyncio.wait_for(work, 900))


def before_it(chunk_id: str) -> str:
    """The chunk of the same sample before this one."""
    sample_id, _, number = chunk_id.rpartition(":")
    return f"{sample_id}:{int(number) - 1}"


async def roll(client: RolloutClient, wanted: RolloutBatch, policies: Policies) -> dict:
    await client.set_policies(policies)
    return {group.prompt_id: group async for group in client.rollout(wanted)}


async def settled(client: RolloutClient, pool_tokens: int = 0):
    """The pool as it is once it is empty and so many tokens were pulled from it, or after WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        view = (await client.status()).pool
        empty = view.status and not view.status["keys"] + view.status["dram_bytes"]
        if (empty and view.counts.get("pool_tokens", 0) >= pool_tokens) or time.monotonic() > deadline_s:
            return view
        await asyncio.sleep(0.2)


async def moved(client: RolloutClient) -> tuple[int, dict, list[dict], dict]:
    """Seed, groups, chunks and counts of the pool before, of a rollout in which KV was pulled and most saves were in
    time: on a busy machine saves and look-ups may be late, and it computes; so there is one rollout after the other.

    Each under a seed of its own: KV of tokens that an engine has made before still lies there, and is not pulled.
    """
    for seed in itertools.count(100):  # the tests before this file have drawn under smaller ones
        await client.forget_history()
        before = (await settled(client)).counts
        groups = await roll(client, batch(f"moved-{seed}", seed=seed, keep_trace=True), moving())
        spans = await client.take_trace(f"moved-{seed}")
        chunks = [span["attributes"] for span in spans if span["name"] == "engine"]
        stored = {chunk["tailrace.chunk.id"]: chunk["tailrace.kv.stored_tokens"] > 0 for chunk in chunks}
        followed = [stored[name] for name in map(before_it, stored) if name in stored]
        if any(chunk["tailrace.kv.pulled_tokens"] for chunk in chunks) and sum(followed) > len(followed) / 2:
            return seed, groups, chunks, before


def test_a_moved_sample_pulls_its_kv_and_leaves_nothing(client):
    seed, groups, chunks, before = run(moved(client))
    pulled = [chunk for chunk in chunks if chunk["tailrace.kv.pulled_tokens"]]
    pool_tokens = before.get("pool_tokens", 0) + sum(chunk["tailrace.kv.pulled_tokens"] for chunk in pulled)
    after = run(settled(client, pool_tokens))
    whole = run(roll(client, batch("whole", seed=seed), Policies(placement="pinned")))
    assert [g.samples[i].token_ids for g in whole.values() for i in (0, 1)] == [
        groups[name].samples[i].token_ids for name in whole for i in (0, 1)
    ]
    assert pulled and {chunk["tailrace.kv.recompute_cause"] for chunk in pulled} == {"tail"}
    stored = {chunk["tailrace.chunk.id"]: chunk["tailrace.kv.stored_tokens"] for chunk in chunks}
    late = [stored[before_it(chunk["tailrace.chunk.id"])] - chunk["tailrace.kv.cached_tokens"] for chunk in pulled]
    assert max(late) <= 32, "all that the chunk before had saved, but for one block"
    assert after.counts["pool_tokens"] == pool_tokens
    assert after.counts["released_keys"] > before.get("released_keys", 0)
    assert after.status["keys"] == after.status["dram_bytes"] == 0


def test_weights_that_do_not_fit_are_refused_and_change_nothing(client, tmp_path):
    with pytest.raises(WeightsRejected, match=str(tmp_path)):
        run(client.update_weights(1, str(tmp_path)))
    status = run(client.status())
    assert status.weights_version == 0 and {replica.weights_version for replica in status.replicas} == {0}


@pytest.mark.parametrize(("version", "kv_on_update"), [(1, "fresh"), (2, "keep")])
def test_an_update_finds_old_kv_only_where_it_was_asked_for(client, other_weights, version, kv_on_update):
    wanted = batch(f"update-{version}", samples=1, max_tokens=LONG_TOKENS, keep_trace=True)

    async def update():
        while not any(b.tokens > 200 for b in (await client.status()).batches):
            await asyncio.sleep(0.05)
        return await client.update_weights(version, str(other_weights))

    async def both():
        return await asyncio.gather(roll(client, wanted, moving(kv_on_update=kv_on_update)), update())

    groups, loaded = run(both())
    spans = [s for s in run(client.take_trace(wanted.batch_id)) if s["name"] == "engine"]
    hits = [chunk["attributes"]["tailrace.kv.cached_tokens"] for chunk in first_chunks(spans, version)]
    assert len(loaded.replicas) == 2 and loaded.version == version
    assert len(hits) == sum(crossing(group, version) is not None for group in groups.values()) > 0
    assert all(len(group.samples[0].token_ids) <= LONG_TOKENS for group in groups.values())
    assert (sum(hits) == 0) == (kv_on_update == "fresh")


@pytest.mark.long
def test_a_replica_that_starts_late_has_the_current_weights_before_it_is_used(client, other_weights):
    wanted = batch("late", samples=4, max_tokens=64)
    version = run(client.status()).weights_version + 1
    run(client.update_weights(version, str(other_weights)))

    async def both():
        return await asyncio.gather(roll(client, wanted, moving()), kill_a_replica(client, "late"))

    groups, _ = run(both())
    assert {s.weights_version for g in groups.values() for sample in g.samples for s in sample.segments} == {version}

    async def replaced():
        while len([r for r in (await client.status()).replicas if r.ready]) < 2:
            await asyncio.sleep(0.2)
        return await roll(client, batch("after"), moving())

    used = {s.replica_id for g in run(replaced()).values() for sample in g.samples for s in sample.segments}
    assert len(used) == 2
    assert run(settled(client)).status["keys"] == 0


def test_the_pool_can_be_drained_under_way(client):
    async def keys() -> int | None:
        status = (await client.status()).pool.status
        return status and status["keys"]

    async def both():
        while await keys() != 0:  # those of an earlier test are swept while nothing is in flight
            await asyncio.sleep(0.05)
        rolling = asyncio.create_task(roll(client, batch("drained", max_tokens=LONG_TOKENS // 2), moving()))
        while not await keys():
            await asyncio.sleep(0.05)
        return await client.drain_pool(), await rolling

    removed, groups = run(both())
    again = run(roll(client, batch("drained-not", max_tokens=LONG_TOKENS // 2), moving()))
    assert removed > 0
    assert {n: g.samples[0].token_ids for n, g in groups.items()} == {
        n: g.samples[0].token_ids for n, g in again.items()
    }


def test_samples_finish_under_their_weights_while_others_begin_under_new_ones(client, served_model):
    async def story():
        present = (await client.status()).weights_version
        policies = moving(kv_on_update="finish")
        old = asyncio.ensure_future(roll(client, batch("finish-old", max_tokens=LONG_TOKENS), policies))
        while not any(b.tokens > 200 for b in (await client.status()).batches):
            await asyncio.sleep(0.05)
        loaded = await client.update_weights(present + 1, str(served_model))
        new = await roll(client, batch("finish-new", max_tokens=16), policies)
        found = [versions_of(await old), versions_of(new)]
        while any(one.weights_version != present + 1 for one in (await client.status()).replicas):
            await asyncio.sleep(0.2)
        return present, loaded, found

    present, loaded, (old, new) = run(story())
    assert len(loaded.replicas) == 1, "the other one keeps the old weights for the samples in flight"
    assert all(len(versions) == 1 for versions in old) and {present} in old
    assert all(versions == {present + 1} for versions in new)


def versions_of(groups: dict) -> list[set[int]]:
    """The weights versions of each sample's tokens."""
    return [{one.weights_version for one in sample.segments} for group in groups.values() for sample in group.samples]
