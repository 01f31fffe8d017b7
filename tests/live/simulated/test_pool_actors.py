"""The detached actors of a node's weights and of the pool, over a stand-in for Ray: made once, and ended with their own
application alone."""

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import RayServeException
from virtual_story import play_in

from tailrace.deployments.staging import keeper
from tailrace.deployments.staging.keeper import SlotKeeper, keep_slots, keepers
from tailrace.deployments.staging.slots import MemorySource, Slots
from tailrace.deployments.staging.stage import Stage
from tailrace.kvpool import pool
from tailrace.kvpool.pool import CALL_S, GONE_LOOKS, JOIN_S, LEASE_S, LOOK_S, NAMESPACE, master_name
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.kvpool.status import MasterAnswer, PoolDown
from tailrace.lab.fuzz.virtual_time import VirtualLoop

CONFIG = PoolConfig(dram_gib=2.0)
NODE = "ab" * 28
"""Of this process."""
ENDPOINT = PoolEndpoint("10.0.0.1:50051", "10.0.0.2", "10.0.0.2:17000", CONFIG)


class FakeRay:
    """Ray in the place of a module's `ray`. `made`: (kind, name, options, arguments) of each actor."""

    def __init__(self):
        self.made, self.killed, self.named = [], [], []
        self.current = SimpleNamespace(name="this one")
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.2", list_named_actors=self._list)
        self.endpoint = lambda *_: ENDPOINT

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: NODE, get_worker_id=lambda: "worker-7", current_actor=self.current)

    def _list(self, all_namespaces: bool) -> list[dict]:
        assert all_namespaces
        return [{"namespace": namespace, "name": name} for namespace, name in self.named]

    def get_actor(self, name: str, namespace: str):
        assert (namespace, name) in self.named
        return SimpleNamespace(name=name)

    def kill(self, actor, no_restart: bool = True) -> None:
        self.killed.append((actor.name, no_restart))

    def remote(self, kind):
        def options(**given):
            def make(*arguments):
                self.made.append((kind, given["name"], given, arguments))
                asked = SimpleNamespace(remote=lambda *call: Call(lambda: self.endpoint(*call)))
                return SimpleNamespace(name=given["name"], endpoint=asked)

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)


class Answer(Future):
    """Notes how long its reader would wait."""

    waits: ClassVar[list[float | None]] = []

    def result(self, timeout: float | None = None):
        Answer.waits.append(timeout)
        return super().result(timeout)


class Call:
    """A call whose answer is waited for on a thread or a loop."""

    def __init__(self, work):
        self._work = work

    def future(self) -> Answer:
        future = Answer()
        try:
            future.set_result(self._work())
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future

    def __await__(self):
        async def answer():
            return self._work()

        return answer().__await__()


@pytest.fixture
def fake(monkeypatch) -> FakeRay:
    fake, ports = FakeRay(), iter(range(20_000, 30_000))
    monkeypatch.setattr(pool, "ray", fake)
    monkeypatch.setattr(keeper, "ray", fake)
    monkeypatch.setattr(pool, "free_port", lambda host: next(ports))
    return fake


def play(story) -> None:
    loop = VirtualLoop()
    play_in(loop, story)


# ---- weights --------------------------------------------------------------------------------------------


def test_a_node_s_keeper_is_made_by_the_service_s_name(fake):
    keep_slots("app-0", "app")
    ((kind, name, options, arguments),) = fake.made
    assert (kind, name, arguments) == (SlotKeeper, f"weights-of-app-0-{NODE}", ("app-0", "app"))
    assert options["namespace"] == NAMESPACE and options["lifetime"] == "detached" and options["get_if_exists"]
    assert options["max_restarts"] == options["max_task_retries"] == -1 and options["num_cpus"] == 0


def test_keepers_are_those_of_the_service_alone(fake):
    ours, prefix = ("weights-of-app-0-node-1", "weights-of-app-0-node-2"), "weights-of-app-00-node-1"
    fake.named = [(NAMESPACE, ours[0]), ("another", ours[0]), (NAMESPACE, prefix), (NAMESPACE, ours[1])]
    assert [one.name for one in keepers("app-0")] == list(ours)


@pytest.fixture
def slots(tmp_path, monkeypatch) -> Slots:
    monkeypatch.setattr(keeper, "Slots", lambda service: Slots(service, tmp_path))
    return Slots("app-0", tmp_path)


def staged(slots: Slots, version: int = 7) -> MemorySource:
    stage = Stage(slots, version, (0, ""))
    stage.add("a", np.ones(3))
    return stage.seal()


def test_weights_of_this_node_are_put_into_the_pool_and_others_are_not(fake, slots, monkeypatch):
    source, puts, joins = staged(slots), [], []
    monkeypatch.setattr(keeper, "put", lambda *given: puts.append(given))
    monkeypatch.setattr(keeper, "join_pool", lambda *given: joins.append(given) or ENDPOINT)

    async def for_ever(_app_name):
        await asyncio.Event().wait()

    monkeypatch.setattr(keeper, "application_gone", for_ever)

    async def story():
        keeping = SlotKeeper("app-0", "app")
        assert await keeping.publish(source, CONFIG) is True
        assert puts == [(source, slots.held()[7, source.digest], ENDPOINT)] and joins == [(CONFIG, "app")]
        for other in (source._replace(version=8), source._replace(digest="0" * 16)):
            assert await keeping.publish(other, CONFIG) is False
        assert len(puts) == len(joins) == 1
        keeping._living.cancel()

    play(story)


def test_slots_end_with_their_application_and_not_before(fake, slots, monkeypatch):
    staged(slots)

    async def application_gone(app_name):
        assert app_name == "app"
        await asyncio.sleep(10.0)

    monkeypatch.setattr(keeper, "application_gone", application_gone)

    async def story():
        SlotKeeper("app-0", "app")
        await asyncio.sleep(9.0)
        assert slots.held() and fake.killed == []
        await asyncio.sleep(2.0)
        assert slots.held() == {} and fake.killed == [("this one", True)]

    play(story)


# ---- the pool -------------------------------------------------------------------------------------------


def test_an_application_has_one_master_which_may_move_and_a_store_for_each_node_which_may_not(fake):
    assert pool.join_pool(CONFIG, "app") is ENDPOINT
    master, store = fake.made
    assert master[0] is pool.MasterActor and master[1] == master_name(CONFIG, "app")
    assert master[3] == (CONFIG, "app", NODE, 20_000, 20_001)
    assert store[0] is pool.StoreActor and store[1] == f"{master[1]}-store-{NODE}"
    config, node_id, handle, host, port = store[3]
    assert (config, node_id, host, port) == (CONFIG, NODE, "10.0.0.2", 20_002) and handle.name == master[1]
    for _, _, options, _ in fake.made:
        wanted = {
            "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1,
            "max_task_retries": -1, "num_cpus": 0, "enable_task_events": False, "memory": 1,
        }  # fmt: skip
        assert {key: options[key] for key in wanted} == wanted
    softs = [one[2]["scheduling_strategy"].soft for one in fake.made]
    nodes = {one[2]["scheduling_strategy"].node_id for one in fake.made}
    assert softs == [True, False] and nodes == {NODE}


def test_pools_of_two_configurations_or_applications_are_two():
    names = {master_name(CONFIG, "app"), master_name(PoolConfig(), "app"), master_name(CONFIG, "other")}
    assert len(names) == 3 and master_name(CONFIG, "app") == master_name(PoolConfig(dram_gib=2.0), "app")


def test_a_store_that_was_leaving_is_asked_for_anew_and_not_for_ever(fake, monkeypatch):
    now_s, slept = [0.0], []

    def sleep(seconds: float) -> None:
        now_s[0] += seconds
        slept.append(seconds)

    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep))
    fails = [ActorDiedError(), ActorDiedError()]

    def endpoint(*given):
        assert given == (JOIN_S, "worker-7")
        if fails:
            raise fails.pop()
        return ENDPOINT

    fake.endpoint = endpoint
    Answer.waits.clear()
    assert pool.join_pool(CONFIG, "app") is ENDPOINT
    assert Answer.waits == [JOIN_S + CALL_S] * 3, "the store itself answers within JOIN_S"
    assert slept == [CALL_S] * 2 and len([made for made in fake.made if made[0] is pool.StoreActor]) == 3
    slept.clear()
    fails.extend([ActorDiedError()] * 1000)
    with pytest.raises(PoolDown, match=r"no pool memory on 10\.0\.0\.2: "):
        pool.join_pool(CONFIG, "app")
    assert JOIN_S <= sum(slept) <= JOIN_S + 2 * CALL_S


@pytest.mark.parametrize("error", [PoolDown("no room"), TimeoutError(), ActorUnavailableError("away\nfor long", None)])
def test_a_pool_that_cannot_be_joined_is_down_in_one_line(fake, error):
    def endpoint(*_):
        raise error

    fake.endpoint = endpoint
    with pytest.raises(PoolDown) as raised:
        pool.join_pool(CONFIG, "app")
    assert "\n" not in str(raised.value)
    if isinstance(error, PoolDown):
        assert str(raised.value) == "no room"
    else:
        assert str(raised.value).startswith("no pool memory on 10.0.0.2: ")


def test_an_engine_keeps_its_store_and_rejoins_once_for_each_new_master(fake):
    addresses = ["10.0.0.1:50051", "10.0.0.3:1", "10.0.0.3:1", "10.0.0.3:1", None, "10.0.0.4:1"]
    asked, joined, fails = [], [], [RuntimeError("the client")]

    def endpoint(*given):
        asked.append(given)
        address = addresses.pop(0) if len(addresses) > 1 else addresses[0]
        if address is None:
            raise ActorDiedError()
        return PoolEndpoint(address, "10.0.0.2", "s", CONFIG)

    async def rejoin(address):
        joined.append(address)
        if fails:
            raise fails.pop()

    fake.endpoint = endpoint

    async def story():
        following = asyncio.ensure_future(pool.follow_pool(CONFIG, "app", ENDPOINT, rejoin))
        await asyncio.sleep(LOOK_S - 0.1)
        assert asked == []
        await asyncio.sleep(2 * LOOK_S)
        assert joined == ["10.0.0.3:1"], "the address that it joined is no news"
        await asyncio.sleep(LOOK_S)
        assert joined == ["10.0.0.3:1"] * 2, "a failed call is made again"
        await asyncio.sleep(2 * LOOK_S)
        assert len(joined) == 2 and len([made for made in fake.made if made[0] is pool.StoreActor]) == 2
        await asyncio.sleep(3 * LOOK_S)
        assert joined == ["10.0.0.3:1", "10.0.0.3:1", "10.0.0.4:1"]
        assert set(asked) == {(CALL_S, "worker-7", LEASE_S)}
        following.cancel()

    play(story)


def test_masters_of_an_application_s_former_pools_are_ended_and_no_others(fake):
    fake.named = [
        (NAMESPACE, "app-kv-1"), (NAMESPACE, "app-kv-2"), (NAMESPACE, "app-kv-1-store-node"), (NAMESPACE, "app2-kv-1"),
        ("another", "app-kv-3"), (NAMESPACE, "app-context-1"),
    ]  # fmt: skip
    pool._end_others("app", "app-kv-2")
    assert [name for name, _ in fake.killed] == ["app-kv-1"]


def test_a_former_master_that_has_ended_since_it_was_listed_holds_nothing_up(fake):
    fake.named = [(NAMESPACE, "app-kv-1"), (NAMESPACE, "app-kv-3")]
    real = fake.get_actor

    def get_actor(name: str, namespace: str):
        if name == "app-kv-1":
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return real(name, namespace)

    fake.get_actor = get_actor
    pool._end_others("app", "app-kv-2")
    assert [name for name, _ in fake.killed] == ["app-kv-3"]


def test_an_application_is_gone_after_looks_in_a_row(monkeypatch):
    there = [True, False, True, *[False] * GONE_LOOKS]
    monkeypatch.setattr(pool, "application_exists", lambda app_name: there.pop(0))

    async def story():
        await pool.application_gone("app")
        assert there == [] and asyncio.get_running_loop().time() == (3 + GONE_LOOKS) * LOOK_S

    play(story)


@pytest.mark.parametrize(
    ("handle", "status", "exists"),
    [
        (None, None, True),
        (RayServeException("not built yet"), ("app",), True),
        (RayServeException("none"), ("other",), False),
        (RayServeException("none"), ActorDiedError(), False),
        (RayServeException("none"), ActorUnavailableError("away", None), True),
        (ActorDiedError(), None, False),
        (ActorUnavailableError("away", None), None, True),
    ],
)
def test_an_application_counts_as_there_while_serve_cannot_be_asked(monkeypatch, handle, status, exists):
    def raised(answer):
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(applications=answer)

    serve = SimpleNamespace(get_app_handle=lambda name: raised(handle), status=lambda: raised(status))
    monkeypatch.setattr(pool, "serve", serve)
    assert pool.application_exists("app") is exists


@pytest.fixture
def parts(fake, monkeypatch):
    """The actors without their processes; what they did, in order."""
    done = []

    async def stop(self):
        done.append("stop")

    async def application_gone(app_name):
        done.append(("gone", app_name))
        await asyncio.sleep(10.0)

    for kind in (pool.KvMaster, pool.KvStoreNode):
        monkeypatch.setattr(kind, "__init__", lambda self, *given: done.append(given))
        monkeypatch.setattr(kind, "stop", stop)
    monkeypatch.setattr(pool, "application_gone", application_gone)
    monkeypatch.setattr(pool, "_end_others", lambda *given: done.append(("others", *given)))
    return done


@pytest.mark.parametrize(("node_id", "ports"), [(NODE, (1, 2)), ("node-1", (20_000, 20_001))])
def test_a_master_ends_former_pools_at_once_and_itself_with_its_application(fake, parts, node_id, ports):
    async def story():
        pool.MasterActor(CONFIG, "app", node_id, 1, 2)
        await asyncio.sleep(9.0)
        begun = [(CONFIG, "10.0.0.2", *ports), ("others", "app", master_name(CONFIG, "app")), ("gone", "app")]
        assert parts == begun and fake.killed == []
        await asyncio.sleep(2.0)
        assert parts == [*begun, "stop"] and fake.killed == [("this one", True)]

    play(story)


def test_a_store_ends_when_it_has_left_or_its_master_is_gone_for_good(fake, parts, monkeypatch):
    answers = [MasterAnswer(master_address="a", mounted=True), ActorUnavailableError("away", None), ActorDiedError()]
    reported, seen = [], []

    def report(*given):
        reported.append(given)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run(self):
        while True:
            seen.append(await self._to_master("status", "segment"))
            await asyncio.sleep(1.0)

    monkeypatch.setattr(pool.KvStoreNode, "run", run)
    master = SimpleNamespace(
        where=SimpleNamespace(remote=lambda: Call(lambda: "10.0.0.1:50051")),
        report=SimpleNamespace(remote=lambda *given: Call(lambda: report(*given))),
    )

    async def story():
        store = pool.StoreActor(CONFIG, "node-2", master, "10.0.0.2", 17)
        assert parts == [(CONFIG, "node-2", "10.0.0.1:50051", "10.0.0.2", 17, store._to_master)]
        await asyncio.sleep(1.5)
        assert fake.killed == [] and seen[1] is None and seen[0].mounted
        await asyncio.sleep(1.0)
        assert parts[-1] == "stop" and fake.killed == [("this one", True)]
        assert reported == [("status", "segment")] * 3

    play(story)
