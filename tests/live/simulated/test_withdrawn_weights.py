"""What waits for weights that the service does not hold any more, or will not have, is refused."""

import asyncio

import pytest
from virtual_cluster import under_way

from simulated.test_pause import BATCH, whole
from simulated.test_sessions import PROMPT
from tailrace.app.calls.refused import RolloutRejected, WeightsRejected
from tailrace.deployments.coordinator.chunk_runner import ChunkRunner
from tailrace.deployments.messages.rollout import GroupResult
from tailrace.lab.fuzz.disk import TORN
from tailrace.lab.fuzz.drivers import driver_client
from tailrace.lab.fuzz.log_disk import LogDisk
from tailrace.policies.families.registry import Policies


async def update_that_is_torn(cluster, client) -> None:
    """Gives the service an update while no replica is up, whose folder is found torn by the first one that starts."""
    for replica in [*cluster.replicas]:
        cluster.kill(replica)
    while (await client.status()).replicas:
        await asyncio.sleep(0.1)
    cluster.disk.folders["w1"] = "one"
    assert (await client.update_weights(1, "w1")).replicas == ()
    cluster.disk.folders["w1"] = TORN


async def groups_of(client) -> list[GroupResult]:
    return [group async for group in client.rollout(BATCH)]


def test_a_batch_and_a_sample_that_wait_for_a_withdrawn_update_are_refused(play):
    async def story(cluster, client):
        other = driver_client(cluster)
        expected = await whole(other)
        earlier = await under_way(cluster, whole(other, BATCH.model_copy(update={"batch_id": "earlier"})))
        await update_that_is_torn(cluster, client)
        session = client.open()
        joined = other.open(batch_id=session.settings.batch_id)  # by a client that has updated nothing
        calls = joined.generate(PROMPT), whole(client, BATCH), session.generate(PROMPT)
        easy, *waiting = [asyncio.ensure_future(one) for one in calls]
        while len(cluster.coordinator.rollouts.batches) < 3:
            await asyncio.sleep(0.1)
        for one in waiting:
            with pytest.raises(WeightsRejected, match="cannot be read"):  # the client gives its update again
                await one
        with pytest.raises(RolloutRejected, match=r"holds weights version 0, the batch wants 1; .*cannot be read"):
            await easy  # it is the same sample
        assert (await client.status()).weights_version == 0
        assert await earlier == expected, "it wants no update"
        await session.close()
        await joined.close()

    play(story)


def test_a_batch_goes_on_once_its_client_can_give_the_update_again(play):
    async def story(cluster, client):
        await update_that_is_torn(cluster, client)
        batch = asyncio.ensure_future(groups_of(client))
        rollouts = cluster.coordinator.rollouts
        withdraw = rollouts.weights._withdraw

        def withdrawn():
            withdraw()
            cluster.disk.folders["w1"] = "one"

        rollouts.weights._withdraw = withdrawn
        groups = await batch
        status = await client.status()
        assert (status.weights_version, status.weights_digest) == (1, "digest-of-one")
        parts = [part for group in groups for sample in group.samples for part in sample.segments]
        assert {part.weights_version for part in parts} == {1}

    play(story)


def test_a_new_coordinator_runs_nothing_on_replicas_that_were_started_on_older_weights(play, monkeypatch):
    """Other replicas' reports name the newer weights at once; its core learned them after a first decision."""
    begun, start = [], ChunkRunner.start

    async def slow(disk, work, *args):
        await asyncio.sleep(0.5)
        return work(*args)

    def starts(runner, action, *given):
        begun.append(action.weights_version)
        start(runner, action, *given)

    async def story(cluster, client):
        monkeypatch.setattr(LogDisk, "in_thread", slow)
        monkeypatch.setattr(ChunkRunner, "start", starts)
        cluster.disk.folders["w1"] = "one"
        await client.update_weights(1, "w1")
        cluster.kill_coordinator(away_s=5.0)
        for _ in range(2):
            cluster.boot(after_s=0.0)
        await asyncio.sleep(1.0)
        assert sorted(one.stepper.stats().weights_version for one in cluster.replicas.values()) == [0, 0, 1, 1]
        session = client.open()
        await asyncio.gather(*(session.generate(PROMPT, index=index) for index in range(12)))
        assert set(begun) == {1}
        await session.close()

    play(story)


def test_what_wants_the_weights_before_an_update_that_comes_while_it_waits_to_be_admitted_is_refused(play):
    async def story(cluster, client):
        cluster.disk.folders["w1"] = "one"
        work = await under_way(cluster, whole(client))
        await client.set_policies(Policies(ordering="fcfs"))  # once nothing is in flight
        pinned, other = {"weights_version": 0}, driver_client(cluster)
        session = other.open(**pinned)
        late = [BATCH.model_copy(update={"batch_id": name} | wants) for name, wants in (("p", pinned), ("any", {}))]
        waiting = [
            asyncio.ensure_future(one) for one in (session.generate(PROMPT), *(whole(other, one) for one in late))
        ]
        while len(cluster.coordinator.rollouts.status().at_admission) < len(waiting):
            await asyncio.sleep(0.1)
        await client.update_weights(1, "w1")
        assert not work.done() and not any(one.done() for one in waiting)
        for one in waiting[:2]:
            with pytest.raises(RolloutRejected, match="holds weights version 1, the batch wants 0"):
                await one
        assert await waiting[2] and await work
        await session.close()

    play(story, mean_tokens=400)
