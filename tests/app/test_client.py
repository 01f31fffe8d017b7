"""The client's blocking twins, over a scripted client: each call has one, from any thread, with or without a loop."""

import asyncio
import inspect
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tailrace.app import cluster
from tailrace.app.calls.blocking import blocking, blocking_iterator
from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.session import RolloutSession
from tailrace.app.errors import StillDeploying, Unreachable
from tailrace.deployments.messages.rollout import BatchSettings


class Scripted:
    """Calls like the client's, and one of a session."""

    def __init__(self):
        self.closed = False

    async def double(self, value: int) -> int:
        """Twice the value."""
        await asyncio.sleep(0)
        if value < 0:
            raise ValueError("below 0")
        return 2 * value

    double_blocking = blocking(double)

    async def count(self, items: int):
        """Numbers from 0."""
        try:
            for item in range(items):
                await asyncio.sleep(0)
                yield item
            if items == 3:
                raise ValueError("three")
        finally:
            self.closed = True

    count_blocking = blocking_iterator(count)

    async def generate(self, settings, request) -> int:
        """The index of the sample."""
        await asyncio.sleep(0.01)
        return request.index


def test_every_call_of_the_client_has_a_blocking_twin():
    members = {name: getattr(RolloutClient, name) for name in dir(RolloutClient)}
    calls = {
        name
        for name, member in members.items()
        if (inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)) and name[0] != "_"
    }
    assert {"rollout", "update_weights", "send_weights", "record_rewards", "reserve", "status"} <= calls
    twins = {name.removesuffix("_blocking") for name in members if name.endswith("_blocking")}
    assert twins == calls
    for name in calls:
        method, twin = getattr(RolloutClient, name), getattr(RolloutClient, f"{name}_blocking")
        assert not inspect.iscoroutinefunction(twin) and not inspect.isasyncgenfunction(twin)
        assert method.__doc__ and method.__doc__ in twin.__doc__, name


def test_a_twin_returns_the_result_or_raises_the_error():
    client = Scripted()
    assert client.double_blocking(4) == 8
    with pytest.raises(ValueError, match="below 0"):
        client.double_blocking(-1)
    assert list(client.count_blocking(2)) == [0, 1]
    with pytest.raises(ValueError, match="three"):
        list(client.count_blocking(3))


def test_a_twin_works_inside_a_running_loop():
    async def driver() -> tuple[int, list[int]]:
        client = Scripted()
        return client.double_blocking(3), list(client.count_blocking(2))

    assert asyncio.run(driver()) == (6, [0, 1])


def test_closing_a_blocking_iterator_closes_the_async_one():
    client = Scripted()
    items = client.count_blocking(1_000_000)
    assert next(items) == 0
    items.close()
    assert client.closed


def test_arguments_that_a_call_does_not_have_are_an_error_and_no_wait():
    with pytest.raises(TypeError, match="items"):
        next(Scripted().count_blocking())


def test_a_blocking_iterator_asks_for_an_item_when_its_caller_does():
    given = []

    class Counting:
        async def count(self):
            for item in range(1_000):
                given.append(item)
                yield item

        count_blocking = blocking_iterator(count)

    items = Counting().count_blocking()
    assert [next(items), next(items)] == [0, 1]
    time.sleep(0.2)  # a slow caller: a thread that ran ahead would have taken all
    assert given == [0, 1]
    assert list(items) == list(range(2, 1_000))


def test_an_iterator_that_ended_or_was_closed_leaves_no_loop_and_no_thread_behind(monkeypatch):
    loops, made = [], asyncio.new_event_loop

    def new_event_loop():
        loops.append(made())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", new_event_loop)
    assert list(Scripted().count_blocking(2)) == [0, 1]
    items = Scripted().count_blocking(5)
    assert next(items) == 0
    items.close()
    with pytest.raises(ValueError, match="three"):
        list(Scripted().count_blocking(3))
    assert [loop.is_closed() for loop in loops] == [True] * 3
    assert not [thread for thread in threading.enumerate() if thread.name == "stream"]


def test_requests_of_several_threads_are_different_samples():
    asked = []

    class Calls:
        async def generate(self, settings, request):
            asked.append(request.index)

    session = RolloutSession(Calls(), BatchSettings(batch_id="s"), lambda beat: None)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: session.generate_blocking(range(5_000)), range(100)))
    finally:
        sys.setswitchinterval(interval_s)
    assert sorted(asked) == list(range(100))


def test_several_readers_of_a_session_share_its_answers_and_all_end():
    async def scenario() -> None:
        session = RolloutSession(Scripted(), BatchSettings(batch_id="s"), lambda beat: None)
        for _ in range(5):
            session.submit((1, 2))

        async def read() -> list[int]:
            return [answer async for answer in session.samples()]

        left = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        async with asyncio.timeout(10):
            answers = await asyncio.gather(*(read() for _ in range(3)))
        assert sorted(index for some in answers for index in some) == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_reader_of_a_session_that_another_task_closes_is_told_so_and_is_not_cancelled():
    class Calls:
        async def generate(self, settings, request):
            await asyncio.sleep(100.0)

        async def close(self, session):
            return True

    async def scenario() -> None:
        session = RolloutSession(Calls(), BatchSettings(batch_id="s"), lambda beat: SimpleNamespace(stop=lambda: None))
        for _ in range(2):
            session.submit((1, 2))
        reader = asyncio.ensure_future(anext(session.samples()))
        await asyncio.sleep(0)
        await session.close()
        for reading in (reader, anext(session.samples())):
            with pytest.raises(ValueError, match="session 's' was closed before a sample had ended"):
                await reading
        assert [answer async for answer in session.samples()] == []

    asyncio.run(scenario())


def test_a_driver_catches_the_built_in_errors():
    assert issubclass(Unreachable, ConnectionError) and Unreachable("there").exit_code == 2
    assert issubclass(StillDeploying, TimeoutError) and StillDeploying("now").exit_code == 1
    assert str(Unreachable("nobody there")) == "nobody there"


@pytest.mark.parametrize(
    "address, taken",
    [
        ("auto", True),
        ("10.0.0.7:6379", True),
        ("127.0.0.1:6379", True),
        ("10.0.0.7:6380", False),
        ("10.0.0.8:6379", False),
    ],
)
def test_connect_refuses_another_cluster_than_the_connected_one(monkeypatch, address, taken):
    context = SimpleNamespace(gcs_address="10.0.0.7:6379")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "_await_application", lambda address, app_name: None)
    monkeypatch.setattr(cluster, "RolloutClient", lambda app_name, role: (app_name, role))
    if taken:
        assert cluster.connect(address, "mine", "observer") == ("mine", "observer")
        return
    with pytest.raises(ValueError, match=r"connected to the Ray cluster at 10\.0\.0\.7:6379"):
        cluster.connect(address)


def test_a_service_that_has_lost_an_engine_is_connected_to_at_once(monkeypatch):
    found = SimpleNamespace(applications={"mine": SimpleNamespace(status="UNHEALTHY")})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=SimpleNamespace(status=lambda: found)))
    monkeypatch.setattr(cluster, "DEPLOY_S", 0.0)
    cluster._await_application("auto", "mine")
    found.applications["mine"].status = "DEPLOYING"
    with pytest.raises(TimeoutError, match="application 'mine' is still DEPLOYING"):
        cluster._await_application("auto", "mine")


def test_ray_s_token_is_readable_to_its_owner_alone(tmp_path):
    token = tmp_path / "auth_token"
    cluster.keep_token_private({"RAY_AUTH_TOKEN_PATH": str(token)})  # none yet
    token.write_text("secret")
    token.chmod(0o644)
    cluster.keep_token_private({"RAY_AUTH_TOKEN_PATH": str(token)})
    assert token.stat().st_mode & 0o777 == 0o600 and token.read_text() == "secret"
