"""`kv_on_update: finish` on the simulated cluster: samples keep their weights, and nobody waits for all to end."""

import asyncio

from virtual_cluster import under_way

from simulated.test_pause import BATCH, whole
from tailrace.lab.verification import finished
from tailrace.lab.verification.finished import certificate, rolled
from tailrace.policies.families.registry import Policies

POLICIES = {"kv_on_update": "finish", "chunking": {"type": "fixed", "chunk_tokens": 32}}


async def versions(client, batch) -> tuple[dict, set[int]]:
    """The batch's tokens, and the weights versions of all its samples; a sample with two fails."""
    tokens, seen = {}, set()
    async for group in client.rollout(batch):
        tokens[group.prompt_id] = [sample.token_ids for sample in group.samples]
        for sample in group.samples:
            (version,) = {segment.weights_version for segment in sample.segments}
            seen.add(version)
    return tokens, seen


def named(name: str):
    return BATCH.model_copy(update={"batch_id": name})


def test_old_samples_end_under_their_weights_while_new_ones_run_under_the_next(play):
    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        expected = await whole(client)
        old = await under_way(cluster, versions(client, named("old")))
        loaded = await client.update_weights(1, "one")
        assert not old.done() and 1 <= len(loaded.replicas) < 3, (
            "one holds the new weights, the others end the old samples"
        )
        new = asyncio.ensure_future(versions(client, named("new")))
        while not any(r.stepper.weights.version == 1 and r.stepper.busy for r in cluster.replicas.values()):
            await asyncio.sleep(0.05)
        assert not old.done()
        assert await old == (expected, {0})
        made, seen = await new
        assert seen == {1} and made != expected
        assert (await versions(client, named("again"))) == (made, {1})
        assert {r.stepper.weights.version for r in cluster.replicas.values()} == {1}
        assert not cluster.coordinator.rollouts.core.replicas.kept
        tokens = sum(len(sample) for samples in expected.values() for sample in samples)
        assert 0 < cluster.coordinator.rollouts.totals.updates <= tokens, "of the old samples, one version each"

    play(story, replicas=3, policies=POLICIES)


def test_one_replica_ends_its_samples_and_then_takes_the_weights(play):
    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        old = await under_way(cluster, versions(client, named("old")))
        update = asyncio.ensure_future(client.update_weights(1, "one"))
        await asyncio.sleep(1.0)
        assert not update.done()
        assert (await old)[1] == {0}
        assert len((await update).replicas) == 1
        assert (await versions(client, named("new")))[1] == {1}

    play(story, replicas=1, policies=POLICIES)


def test_two_updates_in_a_row_and_a_pause_keep_each_sample_whole(play):
    async def story(cluster, client):
        cluster.disk.folders |= {"one": "one", "two": "two"}
        first = await under_way(cluster, versions(client, named("first")))
        await client.update_weights(1, "one")
        second = await under_way(cluster, versions(client, named("second")))
        await client.pause()
        await asyncio.sleep(5.0)
        await client.resume()
        await client.update_weights(2, "two")
        third = asyncio.ensure_future(versions(client, named("third")))
        assert [(await work)[1] for work in (first, second, third)] == [{0}, {1}, {2}]

    play(story, replicas=4, policies=POLICIES)


def test_samples_of_lost_replicas_continue_under_the_newest_weights(play):
    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        old = await under_way(cluster, whole(client, named("old")))
        await client.update_weights(1, "one")
        for name, replica in list(cluster.replicas.items()):
            if replica.stepper.weights.version == 0:
                cluster.kill(name)
        assert sum(map(len, (await old).values())) == 12

    play(story, replicas=3, policies=POLICIES)


def test_verify_finds_one_version_and_its_tokens_in_each_sample_or_says_what_differs(play, monkeypatch):
    async def story(cluster, client):
        cluster.disk.folders |= {"one": "one", "two": "two"}
        found = certificate(await rolled(client, BATCH, "one"))
        assert found["identical"] and found["samples"] > 3 and (found["mixed"], found["flips"]) == (0, 0)
        assert found["compared_tokens"] > 1000
        monkeypatch.setattr(finished, "Policies", lambda **policies: Policies(**policies | {"kv_on_update": "fresh"}))
        found = certificate(await rolled(client, BATCH, "two"))
        assert not found["identical"] and found["mixed"] > 3 and found["flips"] > 3

    play(story, replicas=3)


def test_a_new_coordinator_ends_samples_under_the_weights_that_they_began_with(play):
    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        expected = await whole(client)
        old = await under_way(cluster, versions(client, named("old")))
        await client.update_weights(1, "one")
        cluster.kill_coordinator()
        assert not old.done()
        new = asyncio.ensure_future(versions(client, named("new")))
        assert (await old, (await new)[1]) == ((expected, {0}), {1})
        await asyncio.sleep(10.0)
        assert {r.stepper.weights.version for r in cluster.replicas.values()} == {1}
        core = cluster.coordinator.rollouts.core
        assert not core.replicas.kept and not core._drain._each
        assert cluster.coordinators == 2

    play(story, replicas=3, policies=POLICIES)
