"""Replicas that come and go, on a real cluster: the tail gives one back, another job uses its core, the next step has
it again; a draft model takes its place; copies race; and no token is another one for it."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from tailrace.app.cluster import LOOPBACK_ONLY
from tailrace.deployments.coordinator.journal import Journal, read_journal, replay
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.lab.verification.runs import RACES
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.actions import AbortChunk, StartChunk
from tailrace.policies.protocol.events import ChunkFinished

TRAINER = """
import json, os, sys, time
os.environ.update(json.loads(sys.argv[2]))
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
def train():
    began_s = time.time()
    while time.time() < began_s + 1.0:
        sum(range(10_000))
    return began_s, time.time()

trained = train.remote()
print("asked", flush=True)
print(json.dumps(ray.get(trained)))
"""
IN_TAIL = 4
SOME, ENDLESS = 180, 7900
"""Most tokens of a sample in the tail; and where it is to go on for as long as something is awaited."""


def policies(tail: str | dict, chunk_tokens: int = 64, **more) -> Policies:
    chunking = {"type": "fixed", "chunk_tokens": chunk_tokens}
    return Policies(placement="cost_aware", chunking=chunking, tail=tail, **more)


CONSOLIDATE = {"type": "consolidate", "after_s": 0.5, "max_slowdown": 9.0}


def batch(name: str, tail_tokens: int) -> RolloutBatch:
    """Many short samples, and a few that go on for long."""
    groups = [PromptGroup(prompt_id=f"p{i}", text=f"Count from {i}: ", samples=4, max_tokens=24) for i in range(4)]
    groups.append(PromptGroup(prompt_id="tail", text="Once upon a time", samples=IN_TAIL, max_tokens=tail_tokens))
    return RolloutBatch(batch_id=name, groups=tuple(groups), seed=5)


async def rolled(client, name: str, awaited: Callable[[], Awaitable] | None = None) -> dict:
    """All samples. With `awaited` the tail is cancelled once that has come and all else is there, so that nothing here
    depends on how fast a machine is."""
    samples, wanted = {}, batch(name, ENDLESS if awaited else SOME)
    async for group in client.rollout(wanted):
        samples |= {(group.prompt_id, sample.sample_index): sample for sample in group.samples}
        if awaited and len({prompt_id for prompt_id, _ in samples}) == len(wanted.groups) - 1:
            await awaited()
            await client.cancel(name)
    return samples


def tokens(samples: dict) -> dict:
    return {place: (sample.token_ids, sample.finish_reason) for place, sample in samples.items()}


async def until(client, replicas: int) -> None:
    async for change in client.replica_changes():
        if change.replicas == replicas:
            return


class Copies:
    """Copies in a journal so far. `began`: the chunks that they race with, by their ids; `latest`: last chunk of each
    sample that is no copy; `decided`: copies whose sample has gone on. `stopped`: chunks that were asked to stop;
    `beaten`: those that another chunk beat.
    """

    def __init__(self, races: Journal):
        actions = [action for entry in races.entries for action in getattr(entry, "actions", ())]
        starts = [one for one in actions if isinstance(one, StartChunk)]
        self.began = {one.chunk_id: one.copy_of for one in starts if one.copy_of}
        self.latest = {one.sample_id: one.chunk_id for one in starts if not one.copy_of}
        self.stopped = {one.chunk_id for one in actions if isinstance(one, AbortChunk)}
        self.beaten = {one.chunk_id for one in actions if isinstance(one, AbortChunk) and "was first" in one.reason}
        self.decided = {copy for copy, original in self.began.items() if original not in self.latest.values()}


async def raced(client, journals: list[Journal]) -> None:
    """Copies have begun and some were beaten, as the last of `journals` says. The core looks for room once a second, in
    which a fast machine may have made a whole tail. The journal goes with its core, so it is read before the end."""
    while True:
        journals.append(read_journal((await client.journal(True)).splitlines()))
        copies = Copies(journals[-1])
        if len(copies.began) > 2 and copies.beaten and copies.decided:
            return
        await asyncio.sleep(0.2)


async def drafted(client) -> None:
    """The answer has come of a chunk that a draft model drafted for, from its first token to its last: of more chunks
    than there are samples the sample's chunk before had that draft model too. A sample waits for its drafts here, so it
    takes no longer than that model's start, and a few chunks."""
    while not any(one.work.get("model_resumed", 0) > IN_TAIL for one in (await client.status()).replicas):
        await asyncio.sleep(0.2)


async def steps(client) -> dict:
    import ray

    await client.set_policies(policies("hold"))
    static = await rolled(client, "static")
    await asyncio.wait_for(until(client, 2), 180)  # the tests before this file may have left one
    command = [sys.executable, "-c", TRAINER, ray.get_runtime_context().gcs_address, json.dumps(LOOPBACK_ONLY)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # waits: both cores are taken
    await client.journal(True)
    await client.set_policies(policies("hold", racing=RACES["racing"] | {"room": 4}))
    races: list[Journal] = []
    in_races = await rolled(client, "raced", lambda: raced(client, races))
    await client.journal(False)
    assert await asyncio.to_thread(trainer.stdout.readline) == "asked\n"
    waited = trainer.poll() is None
    await client.set_policies(policies(CONSOLIDATE))
    began_s, seen = time.time(), []

    async def follow():
        async for change in client.replica_changes():
            seen.append(change)

    following = asyncio.create_task(follow())
    said = asyncio.create_task(asyncio.to_thread(trainer.communicate, timeout=240))
    shrunk = await rolled(client, "shrinking", lambda: said)
    ended_s = time.time()
    trained = json.loads((await said)[0])
    await client.reserve(2)
    await asyncio.wait_for(until(client, 2), 180)
    following.cancel()
    await client.set_policies(policies(CONSOLIDATE | {"type": "draft"}, 32, drafting={"type": "fixed", "tokens": 4}))
    await client.forget_history()  # or nothing is left to a draft model
    again = await rolled(client, "again", lambda: drafted(client))
    return {
        "static": static, "shrunk": shrunk, "again": again, "raced": in_races, "races": races[-1], "seen": seen,
        "waited": waited, "trained": trained, "ran": (began_s, ended_s),
    }  # fmt: skip


@pytest.fixture(scope="module")
def found(client):
    return asyncio.run(asyncio.wait_for(steps(client), 900))


def test_the_tail_gives_a_replica_back_and_the_next_step_has_it_again(found):
    up = [change.replicas for change in found["seen"]]
    assert up[0] == 2 and 1 in up and 2 in up[up.index(1) :], up
    assert [change.wanted for change in found["seen"] if change.replicas == 1]


def test_another_job_uses_the_core_before_the_step_has_ended(found):
    began_s, ended_s = found["ran"]
    assert found["waited"], "both cores were taken, and the job had to wait"
    assert began_s < found["trained"][0] < ended_s


def test_no_sample_is_lost_and_no_token_changes(found):
    static = found["static"]
    assert len(static) == 20
    assert max(len(sample.token_ids) for sample in static.values()) > 150, "there was a tail"
    for step in ("raced", "shrunk", "again"):
        assert set(found[step]) == set(static)
        for place, sample in found[step].items():
            made, expected = sample.token_ids, static[place].token_ids
            assert made[: len(expected)] == expected[: len(made)]
            assert place[0] == "tail" or (made, sample.finish_reason) == (expected, static[place].finish_reason)


def test_a_draft_model_ran_where_a_replica_had_gone(found):
    by_model = {
        step: [s.drafted_by_source.get("model", 0) for s in found[step].values()] for step in ("shrunk", "again")
    }
    assert not any(by_model["shrunk"]) and any(by_model["again"])


def test_copies_raced_and_who_was_beaten_was_stopped(found):
    """Copies share the noise, so a race cannot favour short answers; the core answers its journal alike."""
    copies = Copies(found["races"])
    ended = {entry.chunk_id for entry in found["races"].entries if isinstance(entry, ChunkFinished)}
    assert len(copies.began) > 2 and copies.beaten and copies.decided
    assert copies.decided <= ended | copies.stopped, "a sample goes on once its race is over"
    assert replay(found["races"]) is None
