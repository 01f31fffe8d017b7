"""The group context on Ray: engines hear of each other; a dead or frozen actor costs drafts and nothing else."""

import asyncio
import contextlib
import os
import signal

import numpy as np
import pytest
import ray
from ray import serve
from waiting import is_alive, until

from tailrace.deployments.context.actors import ensure_context
from tailrace.deployments.context.context_client import ContextClient
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.history import Answer, prompt_key
from tailrace.deployments.context.prompt_files import shard_of
from tailrace.deployments.context.service import ContextService
from tailrace.deployments.messages.context import GroupRef

APP = "context-test"
SHARDS = 2
KEYS = [prompt_key(f"prompt {number}") for number in range(8)]


def answer(sample_index: int, length: int = 50, reward: float | None = None) -> Answer:
    return Answer(sample_index, 0, reward, True, np.arange(sample_index, sample_index + length, dtype=np.int32))


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Idle:
    async def __call__(self) -> None:
        return None


@pytest.fixture(scope="module")
def application(deploy):
    return deploy(Idle.bind(), APP)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    deadlines = {"deadline_s": 30.0, "lengths_deadline_s": 60.0}  # for an actor that is slow, and not frozen
    return ContextConfig(shards=SHARDS, history_dir=str(folder), retry_s=0.1, **deadlines)


@pytest.fixture(scope="module")
def shards(application, config):
    shards = ensure_context(config, APP)
    pids_of(shards)  # an exchange that an actor's start makes late is sent again
    return shards


@pytest.fixture
def feeds(shards, config):
    with contextlib.ExitStack() as stack:

        def made(writer: str, **knobs) -> ContextClient:
            feed = ContextClient(shards, config.model_copy(update=knobs), writer)
            stack.callback(feed.close)
            return feed

        yield made


class Engine:
    """What an engine would know: every token that its feed has brought, by group and sample."""

    def __init__(self, feed: ContextClient):
        self.feed = feed
        self.tokens: dict[tuple[str, int], dict[int, int]] = {}
        self.history: dict[str, list] = {}

    def hears(self) -> "Engine":
        for fetched in self.feed.take():
            assert all(each.tokens.flags.writeable for each in (*fetched.pieces, *fetched.history))
            for piece in fetched.pieces:
                known = self.tokens.setdefault((piece.group.group_id, piece.sample_index), {})
                known.update(enumerate(piece.tokens.tolist(), piece.start))
            if fetched.history:
                assert fetched.group.group_id not in self.history, "the history of a group comes once"
                self.history[fetched.group.group_id] = fetched.history
        return self

    def knows(self, group: GroupRef, sample_index: int, start: int, tokens: list[int]) -> bool:
        known = self.hears().tokens.get((group.group_id, sample_index), {})
        return all(known.get(position) == token for position, token in enumerate(tokens, start))


def pid_of(shard) -> int:
    return ray.get(shard.status.remote())["pid"]


def pids_of(shards) -> list[int]:
    return [pid_of(shards.at(number)) for number in range(SHARDS)]


def test_engines_hear_of_each_others_samples_and_not_of_their_own(feeds):
    groups = [GroupRef(f"hear/{key[:4]}", key) for key in KEYS]
    a, b = Engine(feeds("a")), Engine(feeds("b"))
    for group in groups:
        a.feed.hold(group)
        b.feed.hold(group)
    for step in range(20):
        for group in groups:
            a.feed.append(group, 0, step * 3, [step, step + 1, step + 2])
            b.feed.append(group, 1, step, np.array([step], np.int32))
    of_a = [token for step in range(20) for token in (step, step + 1, step + 2)]
    until(lambda: all(b.knows(group, 0, 0, of_a) for group in groups))
    until(lambda: all(a.knows(group, 1, 0, list(range(20))) for group in groups))
    assert a.feed.counts()["sent_tokens"] == 20 * 3 * len(groups) and "dropped_tokens" not in a.feed.counts()
    assert {sample for _, sample in a.tokens} == {1} and {sample for _, sample in b.tokens} == {0}
    released = groups[0]
    b.feed.release(released)
    a.feed.append(released, 0, 60, [7])
    a.feed.append(groups[1], 0, 60, [8])
    until(lambda: b.knows(groups[1], 0, 60, [8]))
    assert 60 not in b.tokens[released.group_id, 0]


def test_a_group_at_rest_goes_on_where_it_was_and_a_new_reader_hears_all(feeds):
    group = GroupRef("rest/p", KEYS[0])
    a, b, late = Engine(feeds("a")), Engine(feeds("b")), Engine(feeds("late"))
    a.feed.hold(group)
    b.feed.hold(group)
    a.feed.append(group, 0, 0, [1, 2, 3])
    until(lambda: b.knows(group, 0, 0, [1, 2, 3]))
    b.feed.rest(group)
    a.feed.append(group, 0, 3, [4, 5])
    late.feed.hold(group)
    until(lambda: late.knows(group, 0, 0, [1, 2, 3, 4, 5]))
    b.tokens.clear()
    b.feed.hold(group)
    until(lambda: b.knows(group, 0, 3, [4, 5]))
    assert set(b.tokens[group.group_id, 0]) == {3, 4}


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_killed_actor_comes_back_and_feeds_go_on(shards, feeds, number):
    group = next(GroupRef(f"killed-{number}/{key}", key) for key in KEYS if shard_of(key, SHARDS) == number)
    a, b = Engine(feeds("a")), Engine(feeds("b"))
    a.feed.hold(group)
    b.feed.hold(group)
    a.feed.append(group, 0, 0, [1, 2, 3])
    until(lambda: b.knows(group, 0, 0, [1, 2, 3]))
    pid = pid_of(shards.at(number))
    os.kill(pid, signal.SIGKILL)
    a.feed.append(group, 0, 3, [4, 5])
    b.feed.append(group, 1, 0, [9])
    until(lambda: b.knows(group, 0, 3, [4, 5]) and a.knows(group, 1, 0, [9]))
    assert pid_of(shards.at(number)) != pid


def test_a_frozen_actor_delays_nobody(shards, config, feeds):
    key = next(key for key in KEYS if shard_of(key, SHARDS) == 0)
    group = GroupRef("frozen/p", key)
    service = ContextService(shards, config.model_copy(update={"lengths_deadline_s": 0.2}))
    a, b = Engine(feeds("a", deadline_s=1.0)), Engine(feeds("b"))
    full = Engine(feeds("full", deadline_s=1.0, unsent_tokens=10))
    for engine in (a, b, full):
        engine.feed.hold(group)
    pid = pid_of(shards.at(0))
    os.kill(pid, signal.SIGSTOP)
    try:
        a.feed.append(group, 0, 0, [1, 2, 3])
        for sample_index in (1, 2, 3):
            full.feed.append(group, sample_index, 0, list(range(8)))
        assert asyncio.run(service.lengths([key])) == {}
        assert service.counts()["lengths_failed.TimeoutError"] == 1
        until(lambda: any(name.startswith("exchange_failed.") for name in a.feed.counts()))
        until(lambda: full.feed.counts().get("dropped_tokens") == 16)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: b.knows(group, 0, 0, [1, 2, 3]) and b.knows(group, 3, 0, list(range(8))))
    assert full.feed.counts()["dropped_tokens"] == 16, "the newest are kept"


def test_history_outlives_its_actor_and_reaches_engines(shards, config, feeds):
    key = KEYS[3]
    first, second = GroupRef("epoch-1/p", key), GroupRef("epoch-2/p", key)
    shard = shards.at(shard_of(key, SHARDS))

    async def finish():
        service = ContextService(shards, config)
        service.finish(first, 1, [answer(0), answer(1, 30)])
        while not (await service.lengths([key])):
            await asyncio.sleep(0.05)
        service.reward(key, 1, {0: 1.0})
        while (await service.inspect(key))["history"][0]["mean_reward"] is None:
            await asyncio.sleep(0.05)
        seen = await service.inspect(first.group_id)
        service.end(first)
        while (await service.inspect(first.group_id))["samples"]:
            await asyncio.sleep(0.05)
        assert not any("failed" in name for name in service.counts()), service.counts()
        return seen

    seen = asyncio.run(asyncio.wait_for(finish(), 300))
    assert [sample["tokens"] for sample in seen["samples"]] == [50, 30] and seen["problem"] == ""
    os.kill(pid_of(shard), signal.SIGKILL)
    a, own = Engine(feeds("a")), Engine(feeds("own"))
    a.feed.hold(second)
    own.feed.hold(first)
    until(lambda: second.group_id in a.hears().history)
    assert [(past.epoch, past.reward, len(past.tokens)) for past in a.history[second.group_id]] == [
        (1, 1.0, 50),
        (1, None, 30),
    ]
    own.feed.hold(second._replace(group_id="epoch-3/p"))
    until(lambda: "epoch-3/p" in own.hears().history)
    assert first.group_id not in own.history, "a group is not its own history"


def test_everyone_finds_the_same_actors_and_another_configuration_ends_them(shards, config):
    former = pids_of(shards)
    assert pids_of(ensure_context(config, APP)) == former
    others = ensure_context(config.model_copy(update={"ttl_s": 77.0}), APP)
    ray.get(others.at(0).status.remote())
    until(lambda: not any(map(is_alive, former)))
    assert not set(pids_of(others)) & set(former)


def test_the_actors_end_with_the_application(application, config):
    others = ensure_context(config.model_copy(update={"ttl_s": 77.0}), APP)
    pids = pids_of(others)
    serve.delete(APP)
    until(lambda: not any(map(is_alive, pids)))
