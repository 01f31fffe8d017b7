"""Addressed calls, on a small Serve app of their own: they land where they were sent, or fail at once."""

import asyncio
import os
import signal

import pytest
from waiting import WAIT_S

pytestmark = pytest.mark.live


def small_app():
    """Caller -> two replicas of Echo, and Idle without any; Ray is imported here so that collecting is light."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    addressed = RequestRouterConfig(request_router_class="tailrace.deployments.router:AddressedRouter")
    common = {
        "ray_actor_options": {"num_cpus": 0},
        "request_router_config": addressed,
        "health_check_period_s": 1,
        "graceful_shutdown_timeout_s": 1,  # `slow` is still running at the end
    }

    @serve.deployment(num_replicas=2, max_ongoing_requests=1000, **common)
    class Echo:
        def __init__(self):
            self.name = serve.get_replica_context().replica_id.unique_id

        async def who(self):
            return self.name

        async def echo(self, value):
            await asyncio.sleep(0.01)
            return self.name, value

        async def slow(self):
            await asyncio.sleep(600)

        async def die(self):
            os.kill(os.getpid(), signal.SIGKILL)

    @serve.deployment(autoscaling_config={"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1}, **common)
    class Idle:
        async def who(self):
            return "nobody"

    return caller_deployment().bind(Echo.bind(), Idle.bind())


def caller_deployment():
    from ray import serve

    from tailrace.deployments.router import poll_all

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Caller:
        def __init__(self, echo, idle):
            self.echo, self.idle = echo, idle

        async def names(self, count):
            while len(names := await poll_all(self.echo, "who", timeout_s=60)) < count:
                await asyncio.sleep(0.1)
            return sorted(names)

        async def fan_out(self, names, calls):
            async def one(i):
                name = names[i % len(names)]
                return (name, i), await self.echo.options(session_id=name).echo.remote(i)

            return await asyncio.gather(*(one(i) for i in range(calls)))

        async def error_of(self, method, name):
            try:
                await self.echo.options(session_id=name, method_name=method).remote()
            except Exception as error:  # noqa: BLE001 - which error it is, is what the tests ask
                return [kind.__name__ for kind in type(error).__mro__], str(error)

        async def poll_echo(self, value):
            return await poll_all(self.echo, "echo", 60, value)

        async def poll_slow(self):
            try:
                return await poll_all(self.echo, "slow", timeout_s=0.5)
            except TimeoutError:
                return "timeout"

        async def poll_idle(self):
            return await poll_all(self.idle, "who", timeout_s=60)

    return Caller


@pytest.fixture(scope="module")
def caller(deploy):
    return deploy(small_app(), "router")


def call(response):
    return response.result(timeout_s=WAIT_S)


def test_concurrent_calls_land_where_they_were_sent(caller):
    names = call(caller.names.remote(2))
    assert len(set(names)) == 2
    answers = call(caller.fan_out.remote(names, 64))
    assert len(answers) == 64
    assert all(tuple(sent) == tuple(got) for sent, got in answers)


@pytest.mark.parametrize("name, said", [("nobody", "'nobody' is not running"), ("", "session_id")])
def test_an_unknown_replica_is_an_error(caller, name, said):
    kinds, text = call(caller.error_of.remote("who", name))
    assert "ReplicaGone" in kinds and said in text


def test_a_poll_asks_every_replica(caller):
    names = call(caller.names.remote(2))
    assert sorted(call(caller.poll_echo.remote(5))) == [(name, 5) for name in names]


def test_a_poll_has_a_deadline(caller):
    assert call(caller.poll_slow.remote()) == "timeout"


def test_no_replica_yet_is_an_empty_list(caller):
    assert call(caller.poll_idle.remote()) == []


def test_a_killed_replica_is_an_error_and_the_other_goes_on(caller):
    gone, stays = call(caller.names.remote(2))
    kinds, _ = call(caller.error_of.remote("die", gone))
    assert "RayActorError" in kinds, "the call that was running"
    kinds, _ = call(caller.error_of.remote("who", gone))
    assert "ReplicaGone" in kinds or "RayActorError" in kinds, "the call after it"
    answers = call(caller.fan_out.remote([stays], 4))
    assert {got[0] for _, got in answers} == {stays}
