"""What is lost is made again, with the same tokens: a killed coordinator, a killed driver, and who comes back."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import ray
from ray import serve
from waiting import until

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.refused import RolloutRejected
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.lab.verification.disturbances import kill_actors, kill_the_coordinator
from tailrace.policies.families.registry import Policies

LONG_TOKENS = 2000
"""Far more than any of these tests waits for; samples of a replayed answer do not end earlier."""

CHUNKS = Policies(chunking={"type": "fixed", "chunk_tokens": 24})
UNDRAFTED = Policies(chunking=CHUNKS.chunking, drafting="off")
"""One token a step: thousands take seconds on every machine, and a driver that has to wait for a core is in time."""

KILLED_TOKENS = 300
"""Samples whose coordinator is killed are under way for hundreds of steps."""

DRIVER = """
import asyncio, os, sys
from tailrace import RolloutBatch, connect
batch = RolloutBatch.model_validate_json(open(sys.argv[1]).read())
client = connect()
async def roll():
    async for group in client.rollout(batch):
        pass
asyncio.run(roll())
"""


def run(work):
    """A test that waits for ever says nothing."""
    return asyncio.run(asyncio.wait_for(work, 900))


def batch_of(name: str, groups: int, samples: int, max_tokens: int, forced: bool = False) -> RolloutBatch:
    tokens = tuple(5 + i % 90 for i in range(max_tokens))
    return RolloutBatch(
        batch_id=name,
        groups=tuple(
            PromptGroup(
                prompt_id=f"p{number}",
                text=f"Question {number}: why?",
                samples=samples,
                max_tokens=max_tokens,
                forced_token_ids=(tokens,) * samples if forced else None,
            )
            for number in range(groups)
        ),
        seed=17,
    )


async def tokens_of(client: RolloutClient, batch: RolloutBatch) -> dict:
    """Token ids of every sample, by prompt id; each group has come once."""
    found = {}
    async for group in client.rollout(batch):
        assert group.prompt_id not in found
        found[group.prompt_id] = [sample.token_ids for sample in group.samples]
    return found


async def gone(client: RolloutClient) -> None:
    """Returns once no batch is in flight and no sample runs."""
    while (status := await client.status()).batches or status.running:
        await asyncio.sleep(0.1)


async def seen_tokens(client: RolloutClient, batch_id: str, tokens: int) -> None:
    """Returns once a batch has these tokens."""
    while not any(one.batch_id == batch_id and one.tokens >= tokens for one in (await client.status()).batches):
        await asyncio.sleep(0.1)


def test_a_batch_outlives_its_coordinator(client):
    async def killed():
        await client.set_policies(CHUNKS)
        size = {"groups": 3, "samples": 4, "max_tokens": KILLED_TOKENS}
        undisturbed = await tokens_of(client, batch_of("undisturbed", **size))
        batch = batch_of("survives", **size)
        killer = asyncio.create_task(kill_the_coordinator(client, batch.batch_id))
        found = await tokens_of(client, batch)
        return undisturbed, found, await killer

    undisturbed, found, note = run(killed())
    assert note.startswith("killed 1 coordinator with ") and " 0 samples" not in note
    assert found == undisturbed
    run(gone(client))


def test_a_lost_controller_of_serve_takes_no_replica_with_it(client):
    """A new one asks each replica for the file of its log, and stops one that cannot answer."""

    def engines() -> set[str]:
        return {replica.replica_id for replica in run(client.status()).replicas}

    def settled():
        deployments = serve.status().applications["tailrace"].deployments.values()
        return all(one.status == "HEALTHY" and set(one.replica_states) == {"RUNNING"} for one in deployments)

    before = until(lambda: settled() and engines())
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", "serve")
    first = ray.get(controller.get_pid.remote())
    assert kill_actors("SERVE_CONTROLLER_ACTOR", no_restart=False) == 1
    until(lambda: answered(controller.get_pid.remote()) not in (None, first))
    until(settled)
    assert engines() == before
    assert run(tokens_of(client, batch_of("after", groups=1, samples=2, max_tokens=20)))


def answered(call):
    """The answer of an actor, or None while it starts again."""
    try:
        return ray.get(call, timeout=10)
    except (ray.exceptions.RayError, TimeoutError):
        return None


def test_leaving_the_iterator_cancels_the_batch(client):
    async def leave():
        await client.set_policies(UNDRAFTED)
        stream = client.rollout(batch_of("left", groups=2, samples=2, max_tokens=LONG_TOKENS, forced=True))
        first = asyncio.ensure_future(anext(stream))
        await seen_tokens(client, "left", 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        most = 0
        while batches := (await client.status()).batches:
            most = max(most, batches[0].tokens)
            await asyncio.sleep(0.1)
        return most

    assert run(leave()) < 2 * LONG_TOKENS, "it ran to its end"
    run(gone(client))


@pytest.mark.long
def test_a_killed_drivers_batch_goes_to_the_one_that_comes_back(client, tmp_path):
    batch = batch_of("comes-back", groups=2, samples=2, max_tokens=LONG_TOKENS, forced=True)
    path = tmp_path / "batch.json"
    path.write_text(batch.model_dump_json())
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(path)], cwd=tmp_path, start_new_session=True)

    async def take_over():
        await seen_tokens(client, "comes-back", 20)
        with pytest.raises(RolloutRejected, match="other prompts or settings"):
            await tokens_of(client, batch.model_copy(update={"seed": 1}))
        os.kill(driver.pid, signal.SIGKILL)
        reading, seen = asyncio.create_task(tokens_of(client, batch)), []
        while not reading.done():
            seen += (await client.status()).batches
            await asyncio.sleep(0.2)
        return await reading, seen

    try:
        found, seen = run(take_over())
    finally:
        driver.kill()
        driver.wait()
    assert found == {group.prompt_id: list(group.forced_token_ids) for group in batch.groups}
    ages = [one.seconds for one in seen]
    assert ages == sorted(ages) and min(one.tokens for one in seen) >= 20, "it was taken over, not begun again"
    run(gone(client))
