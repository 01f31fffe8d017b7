"""Stories on the simulated cluster, in virtual time: two replicas, real coordinator, sessions, client and gateway."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random


def play(story: Callable[..., Awaitable[None]], folder: Path, **sizes) -> None:
    """Runs `story(cluster, client)`, and looks for leftovers after it. Needs Ray, so it is for live tests."""
    from tailrace.deployments.messages.liveness import LEASE_S
    from tailrace.lab.fuzz.cluster import SimulatedCluster
    from tailrace.lab.fuzz.drivers import driver_client
    from tailrace.lab.fuzz.log_disk import LogDisk
    from tailrace.lab.fuzz.run import end_of, plan_of
    from tailrace.lab.fuzz.virtual_time import VirtualLoop

    async def whole() -> None:
        size = replace(plan_of(0).size, replicas=2, limits=None, mean_tokens=200, step_tokens=4, step_s=0.1)
        size = replace(size, **({"policies": {}} | sizes))
        cluster = SimulatedCluster(size, Random(0), LogDisk("sound", folder, Random(0)))
        client = driver_client(cluster)
        while len((await client.status()).replicas) < size.replicas:
            await asyncio.sleep(0.1)
        await story(cluster, client)
        await asyncio.sleep(2 * LEASE_S)
        assert not {name: count for name, count in cluster.coordinator.rollouts.books().items() if count}

    loop = VirtualLoop()
    loop.run_until_complete(whole())
    end_of(loop)


def play_gateway(story: Callable[..., Awaitable[None]], folder: Path, **sizes) -> None:
    """Runs `story(cluster, http)`. `http(role)`: an `httpx.AsyncClient` of a gateway with tokens, of a trainer."""
    import httpx

    from tailrace.app.calls.client import RolloutClient
    from tailrace.app.gateway.gateway_config import GatewayConfig
    from tailrace.app.gateway.routes import make_app
    from tailrace.app.gateway.service import GatewayService, ServedModel
    from tailrace.deployments.messages.roles import Role
    from tailrace.lab.fuzz.cluster import SimulatedPrompts
    from tailrace.lab.fuzz.drivers import TaskHeartbeat

    tokens = {role: f"{role}-{'x' * 16}" for role in Role}
    file = folder / "tokens"
    file.write_text("".join(f"{role} {token}\n" for role, token in tokens.items()))

    async def with_gateway(cluster, client) -> None:
        config = GatewayConfig(tokens_file=str(file))
        service = GatewayService(
            lambda role: RolloutClient(handle=cluster.handle(), heartbeat=TaskHeartbeat, role=role), config
        )
        service._model = ServedModel("simulated", "simulated", 512, SimulatedPrompts())  # else transformers loads it
        app = make_app(service, config)

        def http(role: Role | None = Role.TRAINER) -> httpx.AsyncClient:
            headers = {} if role is None else {"Authorization": f"Bearer {tokens[role]}"}
            return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", headers=headers)

        await story(cluster, http)

    play(with_gateway, folder, **sizes)


def steps(cluster) -> list[int]:
    """Steps of each replica so far."""
    return [replica.stepper.stats().steps for replica in cluster.replicas.values()]


async def under_way(cluster, coroutine) -> asyncio.Task:
    """The task of work whose samples run."""
    task = asyncio.ensure_future(coroutine)
    while not cluster.coordinator.rollouts.status().running:
        await asyncio.sleep(0.1)
    await asyncio.sleep(2.0)
    return task


async def quiet(cluster, seconds: float = 30.0) -> None:
    """Nothing runs in a paused cluster, and nothing is made for a while."""
    status = cluster.coordinator.rollouts.status()
    assert status.paused and status.running == 0
    before = steps(cluster)
    await asyncio.sleep(seconds)
    assert steps(cluster) == before
