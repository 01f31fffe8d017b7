"""Batches from their submission to their end: drivers that leave early, refused ones, and tokens that do not count."""

import asyncio
from types import SimpleNamespace

import pytest

from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.coordinator.loop import MadeTokens
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import ChunkEnd, ChunkFinished

POLL_S = 0.1


def batch(name: str, max_tokens: int = 300, prompt_tokens: int = 2) -> RolloutBatch:
    group = PromptGroup(prompt_id="p", token_ids=(2,) * prompt_tokens, samples=4, max_tokens=max_tokens)
    return RolloutBatch(batch_id=name, groups=(group,), seed=3, step=2)


async def whole(client, message: RolloutBatch) -> list:
    return [group async for group in client.rollout(message)]


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(POLL_S)


def test_a_batch_whose_driver_has_left_while_it_waited_ends_as_soon_as_it_is_admitted(play):
    async def story(cluster, client):
        status = cluster.coordinator.rollouts.status
        first = asyncio.ensure_future(whole(client, batch("first")))
        await until(lambda: status().running)
        pause = asyncio.ensure_future(client.pause("wait"))
        left = asyncio.ensure_future(whole(client, batch("left", max_tokens=400)))
        await until(lambda: status().at_admission == ("left",))
        left.cancel()
        await asyncio.gather(first, pause)
        await asyncio.sleep(1.0)
        await client.resume()
        await asyncio.sleep(2.0)
        now = status()
        assert not now.batches and not now.running and not now.waiting and not now.at_admission

    play(story)


def test_a_batch_that_is_cancelled_while_it_waits_ends_as_soon_as_it_is_admitted(play):
    async def story(cluster, client):
        status = cluster.coordinator.rollouts.status
        first = asyncio.ensure_future(whole(client, batch("first")))
        await until(lambda: status().running)
        pause = asyncio.ensure_future(client.pause("wait"))
        waits = asyncio.ensure_future(whole(client, batch("waits", max_tokens=400)))
        await until(lambda: status().at_admission == ("waits",))
        assert await client.cancel("waits") and not await client.cancel("unknown")
        await asyncio.gather(first, pause)
        await client.resume()
        (group,) = await waits
        assert {one.finish_reason for one in group.samples} == {SampleEnd.CANCELLED}
        (group,) = await whole(client, batch("waits", max_tokens=40))
        assert SampleEnd.CANCELLED not in {one.finish_reason for one in group.samples}, "it is another batch"

    play(story)


def test_a_batch_that_was_cancelled_is_not_made_again_by_the_next_coordinator(play):
    async def story(cluster, client):
        work = asyncio.ensure_future(whole(client, batch("b", max_tokens=400)))
        await until(lambda: cluster.coordinator.rollouts.status().running)
        assert await client.cancel("b")
        cluster.kill_coordinator()
        (group,) = await work
        assert {one.finish_reason for one in group.samples} == {SampleEnd.CANCELLED}

    play(story)


def test_the_tokens_of_a_batch_are_forgotten_with_its_end_and_kept_when_it_is_refused(play):
    """Its driver may come again with it, when it can run: what an earlier coordinator has made of it is needed then."""

    async def story(cluster, client):
        forgotten, log = [], cluster.coordinator.token_log
        real = log.forget

        async def forget(batch_id):
            forgotten.append(batch_id)
            await real(batch_id)

        log.forget = forget
        assert log.is_on
        with pytest.raises(RolloutRejected, match="prompt"):
            await whole(client, batch("too-long", prompt_tokens=600))
        await asyncio.sleep(2.0)
        assert forgotten == []
        await whole(client, batch("runs"))
        await until(lambda: forgotten)
        assert forgotten == ["runs"]

    play(story)


def test_tokens_are_written_if_the_core_counts_their_chunk_and_not_if_another_copy_was_first(play):
    async def story(cluster, client):
        rollouts, written = cluster.coordinator.rollouts, []
        core = rollouts.core_holder.present
        made = MadeTokens(
            batch=SimpleNamespace(progress_s=0.0),
            sample=SimpleNamespace(append=lambda *_: written.append("tokens")),
            start=SimpleNamespace(start=0, replica_id="r"),
            result=SimpleNamespace(weights_version=0, token_ids=(), pulled_tokens=0),
            digests=("", ""),
        )
        finished = ChunkFinished(rollouts.loop.now(), "c", 0, ChunkEnd.LENGTH, 0)
        for counts, expected in ((False, []), (True, ["tokens"])):
            fake = {"is_late": lambda _: False, "counts_tokens": lambda _, so=counts: so, "observe": lambda _: None}
            rollouts.core_holder.present = SimpleNamespace(**fake)
            rollouts.trails.observe = lambda *_: None
            rollouts.loop.tell(finished, made)
            rollouts._observe()
            assert written == expected
        rollouts.core_holder.present = core
        del rollouts.trails.observe

    play(story)
