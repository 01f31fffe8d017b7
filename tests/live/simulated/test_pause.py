"""Pauses of the simulated cluster: nothing is made while one holds, and its end changes no token."""

import asyncio

import pytest
from virtual_cluster import quiet, under_way

from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.policies.protocol.actions import SampleEnd

GROUPS = tuple(PromptGroup(prompt_id=f"p{n}", token_ids=(n + 1, 2), samples=4, max_tokens=300) for n in range(3))
BATCH = RolloutBatch(batch_id="b", groups=GROUPS, seed=3, step=2)


async def whole(client, batch=BATCH) -> dict:
    return {group.prompt_id: [s.token_ids for s in group.samples] async for group in client.rollout(batch)}


def test_samples_in_flight_wait_and_have_the_tokens_of_a_run_without_a_pause(play):
    async def story(cluster, client):
        expected = await whole(client)
        work = await under_way(cluster, whole(client, BATCH.model_copy(update={"batch_id": "again"})))
        await client.pause()
        await quiet(cluster)
        status = cluster.coordinator.rollouts.status()
        assert status.waiting > 0 and status.waits_for == "a resume: the service is paused"
        session = client.open(seed=1)
        new = asyncio.ensure_future(session.generate((5,), max_tokens=8))
        await quiet(cluster)
        await client.pause()  # again
        await client.resume()
        assert await work == expected and len((await new).sample.token_ids) == 8
        await session.close()
        assert not cluster.coordinator.rollouts.status().paused

    play(story)


def test_a_pause_that_waits_lets_samples_in_flight_end_and_no_other_one_begin(play):
    async def story(cluster, client):
        session = client.open(seed=1)
        work = await under_way(cluster, whole(client))
        first = asyncio.ensure_future(session.generate((5,), group="g", index=0, max_tokens=60))
        await asyncio.sleep(1.0)
        pause = asyncio.ensure_future(client.pause("wait"))
        await asyncio.sleep(0.5)
        later = asyncio.ensure_future(session.generate((5,), group="g", index=1, max_tokens=60))
        await pause
        await asyncio.sleep(1.0)  # their answers are under way
        assert work.done() and first.done() and not later.done()
        await quiet(cluster)
        await client.resume()
        assert (await later).sample.finish_reason is not SampleEnd.CANCELLED
        await session.close()

    play(story)


def test_a_sample_that_waits_for_the_end_of_a_pause_ends_by_its_deadline_or_with_its_session(play):
    async def story(cluster, client):
        session, other = client.open(seed=1), client.open(seed=2)
        work = await under_way(cluster, whole(client))
        pause = asyncio.ensure_future(client.pause("wait"))
        await asyncio.sleep(0.5)
        closed = asyncio.ensure_future(other.generate((5,), max_tokens=60))
        cut = (await session.generate((5,), max_tokens=60, deadline_s=0.5)).sample
        assert (cut.finish_reason, cut.token_ids) == (SampleEnd.CANCELLED, ())
        await other.close()
        with pytest.raises(RolloutRejected, match="has been closed"):
            await closed
        assert not work.done() and not pause.done(), "it ended before them"
        await pause
        await client.resume()
        await session.close()

    play(story)


def test_a_pause_that_aborts_ends_samples_with_their_tokens_so_far(play):
    async def story(cluster, client):
        expected = await whole(client)
        session = client.open(seed=1)
        work = await under_way(cluster, whole(client, BATCH.model_copy(update={"batch_id": "again"})))
        single = asyncio.ensure_future(session.generate((5,), max_tokens=300))
        await asyncio.sleep(2.0)
        await client.pause("abort")
        found = await work
        for name, samples in found.items():
            assert all(whole_one[: len(one)] == one for whole_one, one in zip(expected[name], samples, strict=True))
        assert found != expected and (await single).sample.finish_reason is SampleEnd.CANCELLED
        await quiet(cluster)
        await client.resume()
        assert await whole(client, BATCH.model_copy(update={"batch_id": "third"})) == expected
        await session.close()

    play(story)


def test_a_resume_ends_a_pause_that_still_waits(play):
    async def story(cluster, client):
        work = await under_way(cluster, whole(client))
        pause = asyncio.ensure_future(client.pause("wait"))
        await asyncio.sleep(0.5)
        assert cluster.coordinator.rollouts.status().paused and not pause.done()
        await client.resume()
        await pause
        assert not work.done() and not cluster.coordinator.rollouts.status().paused
        await work

    play(story, mean_tokens=400)


def test_weights_come_during_a_pause_and_samples_continue_under_them(play):
    async def story(cluster, client):
        cluster.disk.folders["w1"] = "content-1"
        work = await under_way(cluster, anext(aiter(client.rollout(BATCH))))
        await client.pause()
        loaded = await client.update_weights(1, "w1")
        assert loaded.version == 1 and len(loaded.replicas) == 2
        await quiet(cluster)
        await client.resume()
        group = await work
        assert {segment.weights_version for sample in group.samples for segment in sample.segments} == {0, 1}

    play(story)


def test_replicas_that_come_and_go_during_a_pause_start_nothing(play):
    async def story(cluster, client):
        work = await under_way(cluster, whole(client))
        await client.pause()
        cluster.kill(min(cluster.replicas))
        cluster.boot(1.0)
        await asyncio.sleep(20.0)
        assert len(cluster.coordinator.rollouts.status().replicas) == 2
        await quiet(cluster)
        await client.resume()
        await work

    play(story)


def test_a_new_coordinator_is_not_paused(play):
    async def story(cluster, client):
        work = await under_way(cluster, whole(client))
        await client.pause()
        cluster.kill_coordinator()
        assert len(await work) == 3 and not (await client.status()).paused

    play(story)


def test_everything_in_flight_ends_without_a_pause(play):
    async def story(cluster, client):
        work = await under_way(cluster, whole(client))
        assert 0 < await client.cancel_all() <= 12
        assert len(await work) == 3 and await client.cancel_all() == 0

    play(story)
