"""The coordinator's shell: figures with a pool, calls that it ends, reserved replicas, and how often it looks."""

import asyncio

import pytest

from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.coordinator.rollouts import LOOK_REPORTS
from tailrace.deployments.messages.command import WakeKv
from tailrace.deployments.messages.errors import ChunkError
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.metrics.registry import POOL_UP

GROUP = PromptGroup(prompt_id="p", token_ids=(2, 3), samples=4, max_tokens=300)
BATCH = RolloutBatch(batch_id="b", groups=(GROUP,), seed=3, step=2)


async def whole(client, batch=BATCH) -> list:
    return [group async for group in client.rollout(batch)]


@pytest.mark.parametrize("pooled", [False, True])
def test_a_service_shows_its_pool_s_figures_and_keys_and_lets_go_of_what_has_ended(play, pooled):
    async def story(cluster, client):
        manager, released = cluster.coordinator.rollouts.kv_pool_manager, []
        if pooled:
            real = manager.release
            manager.release = lambda batch, action: (released.append(action), real(batch, action))
        await whole(client)
        await asyncio.sleep(5.0)
        assert bool(released) == pooled, "at the end of a sample, not by a sweep"
        families = {one.name: one for one in cluster.coordinator.rollouts.metrics.collect()}
        assert (POOL_UP.name in families) == pooled
        assert not pooled or families[POOL_UP.name].samples[0].value == 1
        detail = await client.pool_detail()
        assert (detail is not None) == pooled
        if pooled:
            assert detail.keys_by_version is not None and not sum(detail.keys_by_version.values())
            assert (await client.status()).pool.keys_by_version is None, "that costs a look at every key"

    play(story, pooled=pooled, policies={"chunking": {"type": "fixed", "chunk_tokens": 32}})


def test_calls_of_a_core_that_was_restarted_are_ended_on_their_replicas(play):
    async def story(cluster, client):
        rollouts = cluster.coordinator.rollouts
        work = asyncio.ensure_future(whole(client))
        while not rollouts._runner.calls:
            await asyncio.sleep(0.1)
        rollouts._restart_core("test", RuntimeError("a policy's own"))
        with pytest.raises(RolloutRejected, match="a policy's own"):
            await work
        await asyncio.sleep(2.0)
        assert not rollouts._runner.calls
        assert not any(replica.stepper.busy for replica in cluster.replicas.values())

    play(story)


def test_kv_that_does_not_wake_is_named_and_the_service_sleeps_until_it_does(play):
    async def story(cluster, client):
        engines = cluster.coordinator.rollouts._engines
        await client.sleep()
        real = engines.ask

        async def ask(replica_id, command):
            if isinstance(command, WakeKv):
                raise ChunkError("no memory")
            return await real(replica_id, command)

        engines.ask = ask
        with pytest.raises(ValueError, match="the KV cache did not wake: ChunkError: no memory"):
            await client.wake_up()
        assert cluster.coordinator.rollouts.status().asleep == ("kv_cache",)
        engines.ask = real
        await client.wake_up()
        assert cluster.coordinator.rollouts.status().asleep == () and len(await whole(client)) == 1

    play(story)


def test_replicas_are_reserved_by_a_whole_number_that_is_not_negative(play):
    async def story(cluster, client):
        rollouts = cluster.coordinator.rollouts
        for wrong in (-1, True, "2", 1.5, None):
            with pytest.raises(ValueError, match="give an integer, 0 or more"):
                rollouts.reserve(wrong)
        assert len(rollouts.loop) == 0
        for right in (0, 2):
            rollouts.reserve(right)
        assert [event.replicas for event, _ in rollouts.loop.take()] == [0, 2]

    play(story)


def test_looks_are_rarer_where_few_replicas_report_and_never_rarer_than_their_reports(play):
    async def story(cluster, client):
        rollouts = cluster.coordinator.rollouts
        report_s, real = rollouts._engines.report_s, rollouts.registry.joined
        for replicas, share in ((0, 1.0), (1, 1.0), (LOOK_REPORTS, 1.0), (4 * LOOK_REPORTS, 0.25)):
            rollouts.registry.joined = dict.fromkeys(map(str, range(replicas)))
            assert rollouts._look_s() == pytest.approx(share * report_s)
        rollouts.registry.joined = real

    play(story)


def test_a_configuration_with_an_unknown_key_is_refused_and_changes_nothing(play):
    """Serve applies a file of an older version without a look at it: its deployment then fails with this line."""

    async def story(cluster, client):
        before = cluster.coordinator.rollouts.deliveries.quotas
        with pytest.raises(ValueError, match=r"user_config\.replicas: unknown key; there are allowed_code"):
            await cluster.coordinator.reconfigure({"replicas": {"min": 1, "max": 2}, "quotas": {"max_samples": 1}})
        assert cluster.coordinator.rollouts.deliveries.quotas == before

    play(story)
