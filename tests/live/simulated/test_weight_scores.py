"""Replicas of the simulated cluster whose weights are not what was loaded: found by their score, named, not used."""

import asyncio

import pytest

from simulated.test_pause import BATCH, whole
from tailrace.app.calls.refused import WeightsRejected
from tailrace.lab.fuzz.disk import digest_of
from tailrace.lab.fuzz.stepper import SimulatedWeights, score_of


@pytest.fixture
def stale(monkeypatch):
    """Contents that a replica's loads bring instead of the source's, under its digest, by the replica's name."""
    contents: dict[str, str] = {}
    load = SimulatedWeights.load

    def loads(weights, version, source, digest):
        load(weights, version, source, digest)
        weights.content = contents.get(id(weights), weights.content)

    monkeypatch.setattr(SimulatedWeights, "load", loads)
    return contents


async def told(cluster, client, text: str) -> None:
    """Returns once the status says so, within a minute."""
    for _ in range(600):
        if text in ((await client.status()).weights_problem or "sound"):
            return
        await asyncio.sleep(0.1)
    raise AssertionError((await client.status()).weights_problem)


def test_a_replica_with_stale_weights_is_named_and_makes_no_token(play, stale):
    async def story(cluster, client):
        cluster.disk.folders |= {"one": "one"}
        sick = sorted(cluster.replicas)[1]
        weights = cluster.replicas[sick].stepper.weights
        stale[id(weights)] = "start"
        loaded = await client.update_weights(1, "one")
        assert set(loaded.set_aside) == {sick} and len(loaded.replicas) == 2 and len(loaded.scores) == 3
        assert weights.digest == digest_of("one"), "a checksum of the source does not see it"
        await told(cluster, client, f"{sick} is set aside: the score of its weights is ")
        status = await client.status()
        assert sick not in {one.replica_id for one in status.replicas}
        assert any(sick in fault.replica_id and "most replicas" in fault.text for fault in status.faults)
        made = cluster.replicas[sick].stepper.stats().work["tokens"]
        expected = await whole(client, BATCH.model_copy(update={"batch_id": "by two"}))
        assert cluster.replicas[sick].stepper.stats().work["tokens"] == made
        stale.clear()  # the next load mends it
        for _ in range(600):
            if sick in {one.replica_id for one in (await client.status()).replicas}:
                break
            await asyncio.sleep(0.1)
        assert (await client.status()).weights_problem == "" and weights.content == "one"
        assert await whole(client, BATCH.model_copy(update={"batch_id": "by three"})) == expected

    play(story, replicas=3)


def test_weights_that_changed_in_place_are_named_at_the_next_update(play):
    async def story(cluster, client):
        cluster.disk.folders |= {"one": "one", "two": "two"}
        assert (await client.update_weights(1, "one")).warnings == {}
        sick = sorted(cluster.replicas)[0]
        cluster.replicas[sick].stepper.weights.content = "another"
        loaded = await client.update_weights(2, "two")
        assert set(loaded.warnings) == {sick} and "changed in place" in loaded.warnings[sick]
        assert not loaded.set_aside

    play(story)


def test_two_that_differ_are_both_used_and_a_trainers_score_decides(play, stale):
    async def story(cluster, client):
        cluster.disk.folders |= {"one": "one", "two": "two"}
        sick = sorted(cluster.replicas)[1]
        stale[id(cluster.replicas[sick].stepper.weights)] = "start"
        loaded = await client.update_weights(1, "one")
        assert not loaded.set_aside and set(loaded.warnings) == set(cluster.replicas)
        loaded = await client.update_weights(2, "two", score=score_of("two"))
        assert set(loaded.set_aside) == {sick} and loaded.replicas == (sorted(cluster.replicas)[0],)
        with pytest.raises(WeightsRejected, match=r"weights 2 are loaded, but .* is set aside: .* from the trainer's"):
            await client.update_weights(2, "two", score=score_of("start of another run"))
        stale.clear()
        await client.update_weights(2, "two", score=score_of("two"))
        await told(cluster, client, "sound")

    play(story)


def test_a_wake_up_scores_again(play, stale):
    async def story(cluster, client):
        sick = sorted(cluster.replicas)[2]
        stale[id(cluster.replicas[sick].stepper.weights)] = "garbage"
        await client.sleep()
        await client.wake_up()
        await told(cluster, client, f"{sick} is set aside: ")

    play(story, replicas=3)


def test_a_shrinking_batch_gives_back_none_that_runs_in_place_of_one_that_is_set_aside(play, stale):
    async def story(cluster, client):
        cluster.disk.folders |= {"one": "one"}
        oldest, middle, newest = list(cluster.replicas)
        stale[id(cluster.replicas[oldest].stepper.weights)] = "start"
        assert set((await client.update_weights(1, "one")).set_aside) == {oldest}
        await whole(client, BATCH)
        while newest in cluster.replicas:
            await asyncio.sleep(1.0)
        await asyncio.sleep(30.0)
        assert list(cluster.replicas) == [oldest, middle], "Serve counts the one that is set aside"
        assert [one.replica_id for one in (await client.status()).replicas] == [middle]

    play(story, replicas=3, limits=(1, 3), policies={"tail": {"type": "release", "after_s": 0.0}})
