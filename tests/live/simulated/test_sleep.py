"""Sleep of the simulated cluster: engines hold nothing meanwhile, whatever comes or goes, and it changes no token."""

import asyncio
from types import SimpleNamespace

import pytest
from virtual_cluster import play_gateway, quiet, under_way

from simulated.test_pause import BATCH, whole
from tailrace.deployments.coordinator.sleep import slept
from tailrace.deployments.messages.chunk import KV_CACHE, TAGS, WEIGHTS
from tailrace.deployments.messages.command import FallAsleep
from tailrace.deployments.messages.roles import Role

AGAIN = BATCH.model_copy(update={"batch_id": "again"})


def asleep(cluster) -> set[tuple[str, ...]]:
    return {replica.stepper.stats().asleep for replica in cluster.replicas.values()}


async def seen(cluster, condition) -> None:
    """Returns once a condition holds, within a minute."""
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it has not come")


def test_samples_in_flight_continue_after_a_sleep_with_the_same_tokens(play):
    async def story(cluster, client):
        expected = await whole(client)
        work = await under_way(cluster, whole(client, AGAIN))
        await client.sleep()
        assert asleep(cluster) == {TAGS} and (await client.status()).asleep == TAGS
        await quiet(cluster)
        with pytest.raises(ValueError, match="the service sleeps; wake it up"):
            await client.resume()
        await client.sleep()  # again
        await client.wake_up([WEIGHTS])
        assert asleep(cluster) == {(KV_CACHE,)} and (await client.status()).asleep == (KV_CACHE,)
        await quiet(cluster)
        await client.wake_up([KV_CACHE])
        assert asleep(cluster) == {()} and not (await client.status()).paused
        assert await work == expected
        await client.wake_up()  # of a service that is awake
        with pytest.raises(ValueError, match="tags: 'all' is not a part that sleeps"):
            await client.wake_up(["all"])

    play(story)


def test_a_replica_that_joins_a_sleeping_service_is_put_to_sleep(play):
    async def story(cluster, client):
        expected = await whole(client)
        work = await under_way(cluster, whole(client, AGAIN))
        await client.sleep()
        cluster.kill(next(iter(cluster.replicas)))
        await seen(cluster, lambda: len(cluster.replicas) == 2 and asleep(cluster) == {TAGS})
        await quiet(cluster)
        await client.wake_up()
        assert await work == expected

    play(story)


def test_a_new_coordinator_goes_on_with_the_sleep(play):
    async def story(cluster, client):
        expected = await whole(client)
        cluster.disk.folders["one"] = "one"
        await client.update_weights(1, "one")
        updated = await whole(client, BATCH.model_copy(update={"batch_id": "updated"}))
        assert updated != expected
        work = await under_way(cluster, whole(client, AGAIN))
        await client.sleep()
        cluster.kill_coordinator()
        status = await client.status()
        await seen(cluster, lambda: len(cluster.coordinator.rollouts.status().replicas) == 2)
        status = await client.status()
        assert status.asleep == TAGS and status.paused and status.weights_version == 1 and asleep(cluster) == {TAGS}
        await client.wake_up()
        assert asleep(cluster) == {()} and await work == updated

    play(story)


@pytest.mark.parametrize(
    ("asleep", "awake", "new", "continues"),
    [(2, 1, 0, True), (1, 0, 3, True), (1, 1, 0, False), (1, 2, 0, False), (0, 2, 1, False)],
)
def test_a_new_coordinator_continues_a_sleep_of_most_replicas_that_have_worked(asleep, awake, new, continues):
    reports = [SimpleNamespace(asleep=TAGS, steps=9)] * asleep
    reports += [SimpleNamespace(asleep=(), steps=9)] * awake + [SimpleNamespace(asleep=(), steps=0)] * new
    assert slept(reports) == (set(TAGS) if continues else set())


def test_a_replica_that_no_wake_up_reached_does_not_put_a_new_coordinator_s_service_to_sleep(play):
    async def story(cluster, client):
        expected = await whole(client)
        replica, _ = cluster.replicas.values()
        cluster.kill_coordinator()
        await asyncio.wrap_future(replica.loop.ask(FallAsleep()))
        async with asyncio.timeout(600):
            assert await whole(client, AGAIN) == expected
        await seen(cluster, lambda: asleep(cluster) == {()})

    play(story)


def test_a_wake_up_that_a_new_coordinator_gets_before_any_report_wakes_its_replicas(play):
    async def story(cluster, client):
        expected = await whole(client)
        await client.sleep()
        cluster.kill_coordinator()
        await client.wake_up()
        await seen(cluster, lambda: asleep(cluster) == {()})
        assert await whole(client, AGAIN) == expected

    play(story)


def restart_with_silent(cluster, replicas: int, seconds: float) -> None:
    """A new coordinator waits for up to 10 s for reports of all replicas before it looks at any."""
    for replica in list(cluster.replicas.values())[:replicas]:
        replica.parted_until_s = asyncio.get_running_loop().time() + seconds
    cluster.kill_coordinator(away_s=1.0)


def test_a_wake_up_that_a_coordinator_has_answered_is_not_lost_with_it(play):
    async def story(cluster, client):
        expected = await whole(client)
        await client.sleep()
        restart_with_silent(cluster, 1, 8.0)
        await client.wake_up()
        cluster.kill_coordinator()
        async with asyncio.timeout(600):
            assert await whole(client, AGAIN) == expected
        assert asleep(cluster) == {()}

    play(story)


@pytest.mark.parametrize(("replicas", "seconds"), [(1, 8.0), (2, 20.0)])
@pytest.mark.parametrize("calls", [("wake_up",), ("sleep", "wake_up")])
def test_a_wake_up_that_comes_to_a_new_coordinator_wakes_what_it_hears_later(play, calls, replicas, seconds):
    async def story(cluster, client):
        expected = await whole(client)
        await client.sleep()
        restart_with_silent(cluster, replicas, seconds)
        for call in calls:
            await getattr(client, call)()
        async with asyncio.timeout(600):
            assert await whole(client, AGAIN) == expected
        assert asleep(cluster) == {()}

    play(story)


def test_a_new_coordinator_has_every_engine_asleep_before_it_says_so(play):
    async def story(cluster, client):
        await whole(client)
        restart_with_silent(cluster, 1, 8.0)
        await client.sleep()
        assert asleep(cluster) == {TAGS} and (await client.status()).asleep == TAGS

    play(story)


def test_a_new_coordinator_finds_the_kv_asleep_too_and_an_engine_that_slept_alone_wakes(play):
    async def story(cluster, client):
        expected = await whole(client)
        await client.sleep()
        await client.wake_up([WEIGHTS])
        cluster.kill_coordinator()
        await client.status()
        await seen(cluster, lambda: cluster.coordinator.rollouts.status().asleep == (KV_CACHE,))
        await client.wake_up()
        assert asleep(cluster) == {()}
        replica, _ = cluster.replicas.values()
        await asyncio.wrap_future(replica.loop.ask(FallAsleep()))  # as one that a former coordinator had put to sleep
        await seen(cluster, lambda: asleep(cluster) == {()})
        assert await whole(client, AGAIN) == expected

    play(story)


def test_an_update_brings_the_new_weights_to_engines_that_sleep(play):
    async def story(cluster, client):
        await whole(client)
        cluster.disk.folders["one"] = "one"
        await client.sleep("abort")
        loaded = await client.update_weights(1, "one")
        assert loaded.version == 1 and len(loaded.replicas) == 2 and asleep(cluster) == {(KV_CACHE,)}
        await quiet(cluster)
        await client.wake_up()
        found = await client.check_weights()
        assert found.version == 1 and found.checksums == {"w": "one"} and not found.unlike and len(found.replicas) == 2
        async for group in client.rollout(AGAIN):
            assert {part.weights_version for one in group.samples for part in one.segments} == {1}

    play(story)


def test_an_update_during_the_pause_of_a_sleep_is_loaded_and_the_sleep_refused(play):
    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        work = await under_way(cluster, whole(client))
        slept = asyncio.ensure_future(client.sleep("wait"))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            assert len((await client.update_weights(1, "one")).replicas) == 2
        with pytest.raises(ValueError, match="the service was woken before it slept"):
            await slept
        assert asleep(cluster) == {()} and not (await client.status()).paused and await work

    play(story)


def test_a_service_whose_weights_could_not_come_back_stays_awake(play):
    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        await client.update_weights(1, "one")
        expected = await whole(client)
        work = await under_way(cluster, whole(client, AGAIN))
        cluster.disk.folders["one"] = "two"  # a trainer writes into it again
        with pytest.raises(ValueError, match=r"the service does not sleep: .*holds other weights now"):
            await client.sleep()
        status = await client.status()
        assert not status.asleep and not status.paused and asleep(cluster) == {()}
        assert await work == expected

    play(story)


def test_of_two_sleeps_at_once_that_fail_neither_says_that_the_service_sleeps(play):
    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        await client.update_weights(1, "one")
        cluster.disk.folders["one"] = "another"
        refused = await asyncio.gather(client.sleep(), client.sleep(), return_exceptions=True)
        assert sorted(str(one).partition(":")[0] for one in refused) == [
            "the service does not sleep", "the service was woken before it slept",
        ]  # fmt: skip
        assert asleep(cluster) == {()} and not (await client.status()).paused

    play(story)


def test_weights_that_vanish_during_a_sleep_leave_it_asleep_until_others_come(play, monkeypatch):
    monkeypatch.setattr("tailrace.deployments.coordinator.weights.LOAD_S", 20.0)

    async def story(cluster, client):
        cluster.disk.folders["one"] = "one"
        await client.update_weights(1, "one")
        await client.sleep()
        del cluster.disk.folders["one"]
        with pytest.raises(ValueError, match="no such folder on this machine"):
            await client.wake_up()
        assert (await client.status()).paused
        cluster.disk.folders["two"] = "two"
        await client.update_weights(2, "two")
        await client.wake_up()
        assert asleep(cluster) == {()} and await whole(client)

    play(story)


def test_the_routes_are_vllm_s(tmp_path):
    async def story(cluster, http):
        async with http() as trainer, http(Role.EVALUATOR) as evaluator:
            assert (await evaluator.post("/sleep")).status_code == 403
            before = (await trainer.post("/weight_checker", json={"action": "checksum"})).json()
            assert before["checksums"] == {"w": "start"} and before["replicas"] == 2 and before["mismatches"] == []
            assert (await trainer.post("/sleep?level=2&mode=keep")).json() == {"status": "sleeping", "level": 2}
            assert (await trainer.get("/is_sleeping")).json() == {"is_sleeping": True}
            refused = await trainer.post("/resume")
            assert refused.status_code == 400 and "wake it up" in refused.json()["error"]["message"]
            partly = await trainer.post("/wake_up?tags=weights")
            assert partly.json() == {"status": "sleeping", "tags": ["weights"]}
            assert (await trainer.post("/wake_up")).json() == {"status": "awake", "tags": None}
            assert (await trainer.get("/is_sleeping")).json() == {"is_sleeping": False}
            await trainer.post("/sleep?level=0")
            assert (await trainer.get("/is_paused")).json() == {"is_paused": True}
            await trainer.post("/wake_up?tags=scheduling")
            assert (await trainer.get("/is_paused")).json() == {"is_paused": False}
            same = {"action": "compare", "baseline": before["checksums"]}
            assert (await trainer.post("/weight_checker", json=same)).json() == {"match": True, "mismatches": []}
            same["baseline"] = {"w": "other", "v": "?"}
            compared = (await trainer.post("/weight_checker", json=same)).json()
            assert compared == {"match": False, "mismatches": ["v", "w"]}
            for wrong in ({"action": "reset"}, {"action": "compare"}):
                assert (await trainer.post("/weight_checker", json=wrong)).status_code == 400

    play_gateway(story, tmp_path)
