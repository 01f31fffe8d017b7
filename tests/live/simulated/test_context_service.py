"""The coordinator's side of the group context over scripted shards: each call at its owner, and rollouts never fail.

Ray is not started: shards are objects of this process, and its actors' names are kept in a dictionary.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray.exceptions import RayActorError

from tailrace.deployments.context import actors
from tailrace.deployments.context.actors import Shards, ensure_context
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.history import Answer, PastLength
from tailrace.deployments.context.prompt_files import shard_of
from tailrace.deployments.context.service import CALL_S, ContextService
from tailrace.deployments.context.shard_handles import NoShard
from tailrace.deployments.messages.context import GroupRef
from tailrace.kvpool.pool import NAMESPACE
from tailrace.lab.fuzz.virtual_time import VirtualLoop

KEYS = [f"key {number}" for number in range(8)]
GROUP = GroupRef("b/p", KEYS[0])
ANSWERS = [Answer(0, 1, None, True, np.arange(3, dtype=np.int32))]


class Peers:
    """`fails`: what a call of (index, method) raises or returns, once each."""

    def __init__(self, shards: int = 1):
        self.shards, self.calls, self.lost, self.fails, self.answers = shards, [], [], {}, {}

    def at(self, index: int):
        if index >= self.shards:
            raise NoShard(str(index))
        return _Shard(self, index)

    def lose(self, index: int) -> None:
        self.lost.append(index)

    def named(self, method: str) -> list[tuple]:
        return [(index, *arguments) for index, name, *arguments in self.calls if name == method]


class _Shard:
    def __init__(self, peers: Peers, index: int):
        self._peers, self._index = peers, index

    def __getattr__(self, method: str):
        return SimpleNamespace(remote=lambda *arguments: self._call(method, *arguments))

    async def _call(self, method: str, *arguments):
        peers, index = self._peers, self._index
        peers.calls.append((index, method, *arguments))
        if failures := peers.fails.get((index, method)):
            failure = failures.pop(0)
            if isinstance(failure, BaseException):
                raise failure
            return await failure if asyncio.iscoroutine(failure) else failure
        answer = peers.answers.get(method)
        return answer(index, *arguments) if callable(answer) else answer


def play(story: Callable, peers: Peers, **config) -> ContextService:
    async def whole() -> ContextService:
        service = ContextService(peers, ContextConfig(**{"shards": peers.shards} | config))
        await story(service)
        return service

    loop = VirtualLoop()
    try:
        service = loop.run_until_complete(whole())
        assert loop.errors == []
        return service
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def lengths_of(index: int, keys: list[str]) -> dict:
    return {key: [PastLength(index, int(key.split()[1]), True)] for key in keys if key != KEYS[1]}


def test_each_shard_is_asked_once_for_its_own_prompts():
    peers = Peers(3)
    peers.answers["lengths"] = lengths_of

    async def story(service):
        found = await service.lengths([*KEYS, KEYS[0]])
        assert found == {k: [PastLength(shard_of(k, 3), int(k.split()[1]), True)] for k in KEYS if k != KEYS[1]}
        asked = peers.named("lengths")
        assert sorted(key for _, keys in asked for key in keys) == sorted(KEYS) and len(asked) <= 3
        assert await service.lengths([]) == {}

    assert "lengths_failed.TimeoutError" not in play(story, peers).counts()


def test_lengths_that_are_late_or_failed_are_none_and_others_come():
    peers = Peers(2)
    peers.answers["lengths"] = lengths_of
    peers.fails[1, "lengths"] = [asyncio.sleep(1.0), ValueError("odd")]

    async def story(service):
        began_s = asyncio.get_running_loop().time()
        found = await service.lengths(KEYS)
        assert asyncio.get_running_loop().time() - began_s == 0.5
        assert found and all(shard_of(key, 2) == 0 for key in found)
        assert all(shard_of(key, 2) == 0 for key in await service.lengths(KEYS))
        assert len(await service.lengths(KEYS)) == len(KEYS) - 1

    counts = play(story, peers, lengths_deadline_s=0.5).counts()
    assert counts == {"lengths": 6, "lengths_failed.TimeoutError": 1, "lengths_failed.ValueError": 1, "shards": 2}


@pytest.mark.parametrize(
    ("method", "tell", "arguments"),
    [
        ("finish", lambda service: service.finish(GROUP, 4, ANSWERS), ([(GROUP, 4, ANSWERS)],)),
        ("end", lambda service: service.end(GROUP), (GROUP,)),
        ("reward", lambda service: service.reward(GROUP.prompt_key, 4, {0: 1.5}), (GROUP.prompt_key, 4, {0: 1.5})),
    ],
)
def test_what_is_told_goes_to_the_prompt_s_shard_once_and_nobody_waits(method, tell, arguments):
    peers = Peers(3)

    async def story(service):
        tell(service)
        assert peers.calls == []
        await asyncio.sleep(1.0)
        assert peers.named(method) == [(shard_of(GROUP.prompt_key, 3), *arguments)] and len(peers.calls) == 1
        assert not service._told

    assert play(story, peers).counts() == {method: 1, "shards": 3}


def test_calls_during_a_call_go_together_and_rewards_after_their_answers():
    peers = Peers(1)
    peers.answers["lengths"] = lengths_of
    peers.fails[0, "finish"] = [asyncio.sleep(0.2)]

    async def story(service):
        for epoch in range(4):
            service.finish(GROUP, epoch, ANSWERS)
            await asyncio.sleep(0.01)
        service.reward(GROUP.prompt_key, 3, {0: 1.5})
        found = await asyncio.gather(*(service.lengths([key]) for key in (*KEYS, KEYS[0])))
        assert [sorted(one) for one in found] == [[key] if key != KEYS[1] else [] for key in (*KEYS, KEYS[0])]
        await asyncio.sleep(1.0)

    play(story, peers)
    one, others = ([epoch for _, epoch, _ in ended] for _, ended in peers.named("finish"))
    assert (one, others) == ([0], [1, 2, 3])
    assert [name for _, name, *_ in peers.calls][-1] == "reward" and peers.named("lengths") == [(0, KEYS)]


@pytest.mark.parametrize("error", [RayActorError(), NoShard("0")])
def test_a_call_to_a_shard_that_is_being_started_is_repeated_until_its_deadline(error):
    peers = Peers(1)
    peers.fails[0, "finish"] = [error, error]

    async def story(service):
        service.finish(GROUP, 4, ANSWERS)
        await asyncio.sleep(1.5)
        assert len(peers.named("finish")) == 2, "a pause of retry_s before each"
        await asyncio.sleep(1.0)
        assert len(peers.named("finish")) == 3 and peers.lost == [0, 0]
        peers.shards = 0
        service.end(GROUP)
        await asyncio.sleep(CALL_S + 1.0)
        assert not service._told

    assert play(story, peers, retry_s=1.0).counts() == {
        "finish": 1,
        "end": 1,
        "end_failed.TimeoutError": 1,
        "shards": 1,
    }


@pytest.mark.parametrize("error", [ValueError("odd"), asyncio.CancelledError()])
def test_a_call_that_fails_is_counted_by_its_cause_and_harms_nobody(error):
    peers = Peers(1)
    peers.fails[0, "finish"] = [error]

    async def story(service):
        service.finish(GROUP, 4, ANSWERS)
        await asyncio.sleep(1.0)
        assert len(peers.named("finish")) == 1 and not service._told

    assert play(story, peers).counts()[f"finish_failed.{type(error).__name__}"] == 1


def test_a_caller_that_is_cancelled_is():
    peers = Peers(1)
    peers.fails[0, "lengths"] = [asyncio.sleep(100.0)]

    async def story(service):
        asking = asyncio.ensure_future(service.lengths(KEYS))
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled()

    counts = play(story, peers, lengths_deadline_s=50.0).counts()
    assert not [name for name in counts if "failed" in name]


def test_all_history_is_forgotten_and_the_fullest_view_of_a_group_is_shown():
    peers = Peers(3)
    peers.answers["forget_history"] = lambda index: 10**index
    peers.answers["inspect"] = lambda index, name: {"samples": [index] * (index % 2)} if index else None

    async def story(service):
        assert await service.forget_history() == 111
        assert await service.inspect("p") == {"samples": [1]}
        peers.fails[1, "inspect"] = [ValueError("odd")]
        assert await service.inspect("p") == {"samples": []}
        peers.answers["inspect"] = None
        assert await service.inspect("p") is None

    play(story, peers)


# ---- the actors -----------------------------------------------------------------------------------------


class FakeRay:
    """Ray's actors by name, in the place of the modules' `ray`."""

    def __init__(self):
        self.actors: dict[tuple[str, str], SimpleNamespace] = {}
        self.killed, self.looks, self.softs = [], 0, []
        self.util = SimpleNamespace(list_named_actors=self._list)

    def _list(self, all_namespaces: bool) -> list[dict]:
        assert all_namespaces
        return [{"namespace": namespace, "name": name} for namespace, name in self.actors]

    def get_actor(self, name: str, namespace: str):
        self.looks += 1
        if (namespace, name) not in self.actors:
            raise ValueError(name)
        return self.actors[namespace, name]

    def kill(self, actor, no_restart: bool = True) -> None:
        self.killed.append((actor.name, no_restart))
        self.actors.pop((NAMESPACE, actor.name), None)

    def detached(self, kind, name: str, soft: bool = False):
        def remote(*arguments):
            self.softs.append(soft)
            made = SimpleNamespace(name=name, kind=kind, arguments=arguments)
            return self.actors.setdefault((NAMESPACE, name), made)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def fake(monkeypatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(actors, "ray", fake)
    monkeypatch.setattr(actors, "detached_actor", fake.detached)
    return fake


def test_the_configured_shards_are_started_once_and_found_by_others(fake):
    config = ContextConfig(shards=2)
    shards = ensure_context(config, "app")
    ensure_context(config, "app")
    assert [one.arguments for one in fake.actors.values()] == [(config, 0, "app")], "which starts the others"
    shards.start(1)
    shards.start(1)
    assert [one.arguments for one in fake.actors.values()] == [(config, 0, "app"), (config, 1, "app")]
    assert all(one.kind is actors.ShardActor for one in fake.actors.values()) and set(fake.softs) == {True}
    assert shards.at(1).arguments[1] == 1 and fake.looks == 0, "it has the handles"
    other = Shards(config, "app")
    assert other.at(1) is shards.at(1) and other.at(1) and fake.looks == 1
    with pytest.raises(NoShard):
        other.at(2)
    with pytest.raises(NoShard):
        Shards(config.model_copy(update={"ttl_s": 1.0}), "app").at(0)
    with pytest.raises(NoShard):
        Shards(config, "another").at(0)


def test_shards_of_a_former_configuration_are_ended_and_no_others(fake):
    present, former = ContextConfig(), ContextConfig(ttl_s=1.0)
    ensure_context(present, "app")
    ensure_context(former, "app")
    ensure_context(former, "application")
    fake.actors["another namespace", "app-context-1"] = SimpleNamespace(name="app-context-1")
    fake.actors[NAMESPACE, "app-kv-1"] = SimpleNamespace(name="app-kv-1")
    gone = Shards(former, "app").at(0).name
    actors._end_others("app", actors._family(present, "app"))
    assert [name for name, _ in fake.killed] == [gone]


def test_a_former_shard_that_has_ended_since_it_was_listed_holds_nothing_up(fake):
    former = ContextConfig(ttl_s=1.0)
    ensure_context(former, "app")
    listed = [{"namespace": NAMESPACE, "name": "app-context-1-0"}, *fake._list(all_namespaces=True)]
    fake.util.list_named_actors = lambda all_namespaces: listed
    actors._end_others("app", actors._family(ContextConfig(), "app"))
    assert [name for name, _ in fake.killed] == [listed[1]["name"]]


@pytest.mark.parametrize("index", [0, 1])
def test_each_shard_ends_with_its_application_and_the_first_starts_the_others(fake, monkeypatch, index):
    gone, others = [], []
    fake.get_runtime_context = lambda: SimpleNamespace(current_actor=SimpleNamespace(name="itself"))
    monkeypatch.setattr(actors, "_end_others", lambda *given: others.append(given))

    async def application_gone(name):
        gone.append(name)
        await asyncio.sleep(10.0)

    monkeypatch.setattr(actors, "application_gone", application_gone)
    config = ContextConfig(shards=2)

    async def story():
        shard = actors.ShardActor(config, index, "app")
        started = [one.arguments[1] for one in fake.actors.values()]
        await asyncio.sleep(4.0)
        assert fake.killed == [] and started == ([1] if index == 0 else [])
        await asyncio.sleep(7.0)
        assert fake.killed == [("itself", True)] and shard._living.done() and gone == ["app"]
        assert others == ([("app", actors._family(config, "app"))] if index == 0 else [])

    loop = VirtualLoop()
    loop.run_until_complete(story())
    loop.close()
    assert ray is not fake
