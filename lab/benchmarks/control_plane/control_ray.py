"""Benchmark of the control plane's calls through Ray and Serve: coordinator to one engine and to all, engine to
context; and of items that an engine or an actor pushes through one call.

A real Serve application, Coordinator -> Engines, is addressed and polled as the service is; its engines do nothing. The
shard of the group context is real. Serve's calls are measured inside the coordinator's replica, where the core's loop
runs. Invariant: what was started is stopped. Called by lab/benchmarks/control_plane/control.py.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import numpy as np

from tailrace.app.cluster import LOOPBACK_ONLY
from tailrace.app.errors import Failed
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.group_log import NOWHERE
from tailrace.deployments.context.live_groups import Packet, Want
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.context import GroupRef, Piece
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.lab.benchmarks.control_plane.rpc_latency import cost_of
from tailrace.lab.benchmarks.control_plane.stream_cost import cost_of_stream, sent_items
from tailrace.policies.protocol.events import ChunkEnd

APP = "bench-control"
ENGINES = 4
"""Number of engines that are polled together. The cost of a poll for each engine is the caller's, wherever the engines
run.
"""

CHUNK_TOKENS, CONTEXT_TOKENS = 8_192, 10_000
"""Tokens of the measured chunk's result, and of its context: half way through an answer of 20,000 tokens."""

RUNNING = 32
"""Number of samples of a replica. A polled engine reports each, and an exchange with the context's shard has a piece of
each.
"""

PIECE_TOKENS = 12
"""Tokens of a sample in a quarter of a second (`linger_s`), at 50 tokens/s."""

START_S, MEASURE_S = 120.0, 600.0


def measure(calls: int, say: Callable[[str], None]) -> dict[str, dict]:
    """Returns the figures of `serve_call`, `serve_chunk`, `serve_poll`, `serve_stream`, `actor_call`, `actor_exchange`
    and `actor_stream`. Raises Failed, in one line, if Ray fails.
    """
    with cluster():
        from ray import serve
        from ray.exceptions import RayError

        try:
            say("starting a Serve application")
            coordinator = serve.run(_application(), name=APP, route_prefix=None)
            found = {}
            for what in ("call", "chunk", "poll", "stream"):
                found[f"serve_{what}"] = coordinator.measure.remote(what, calls).result(timeout_s=MEASURE_S)
                say(f"serve_{what}: {found[f'serve_{what}']}")
            for name, of_actor in asyncio.run(_actors(calls)).items():
                found[name] = of_actor
                say(f"{name}: {of_actor}")
        except (RayError, RuntimeError, TimeoutError) as error:
            raise Failed(f"Ray: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}") from error
    return found


@contextmanager
def cluster() -> Iterator[None]:
    os.environ.update(LOOPBACK_ONLY)  # before Ray is imported
    import ray
    from ray import serve

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler aborts, and leaves processes behind
    logging.getLogger("ray.serve").setLevel("WARNING")
    try:
        serve.start(proxy_location="Disabled", http_options={"host": "127.0.0.1"})
        yield
    finally:
        with redirect_stdout(StringIO()):  # Ray 2.60 prints there that its controller, now stopped, has ended
            serve.shutdown()
            ray.shutdown()


def _application():
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    addressed = RequestRouterConfig(request_router_class="tailrace.deployments.router:AddressedRouter")
    light = {"num_cpus": 0}
    engines = serve.deployment(NoEngine).options(
        num_replicas=ENGINES, max_ongoing_requests=65_536, request_router_config=addressed, ray_actor_options=light
    )
    coordinator = serve.deployment(Caller).options(max_ongoing_requests=10_000, ray_actor_options=light)
    return coordinator.bind(engines.bind())


class Sender:
    """A deployment or an actor that sends items through one call."""

    async def reports(self, count: int, apart_s: float) -> AsyncIterator[tuple[float, bytes]]:
        async for item in sent_items(count, apart_s):
            yield item

    async def cpu_s(self) -> float:
        return time.process_time()


class NoEngine(Sender):
    """An engine that answers at once, with messages as long as a real engine's."""

    def __init__(self):
        from ray import serve

        self._name = serve.get_replica_context().replica_id.unique_id
        tokens = np.zeros(CHUNK_TOKENS, np.int32)
        logprobs = tokens.astype(np.float32)
        counted = ChunkEnd.LENGTH, 0, 0.0, 0.0, 0.0, 0, 0
        self._result = ChunkResult("chunk", tokens, logprobs, logprobs, *counted)
        self._running = {f"batch/prompt-{n}#0/1": n for n in range(RUNNING)}

    async def nothing(self) -> None:
        """Does nothing: the smallest call."""

    async def generate_chunk(self, chunk: ChunkRequest) -> ChunkResult:
        return self._result

    async def stats(self) -> EngineStats:
        return EngineStats(
            replica_id=self._name,
            weights_version=0,
            block_tokens=32,
            kv_capacity_blocks=10_000,
            max_running=RUNNING,
            max_model_len=40_000,
            draft_tokens=16,
            observed_at=time.time(),
            running=self._running,
        )


class Caller:
    """The coordinator's side of the calls. `engines`: a handle of NoEngine."""

    def __init__(self, engines):
        self._engines = engines

    async def measure(self, what: str, calls: int) -> dict:
        from tailrace.deployments.router import poll_all

        async with asyncio.timeout(START_S):
            while len(answers := await poll_all(self._engines, "stats", START_S)) < ENGINES:
                await asyncio.sleep(0.1)

        def ask(method: str, *arguments):
            """Calls a method of one engine, as `deployments.coordinator.engine_client` does."""
            return self._engines.options(session_id=answers[0].replica_id, method_name=method).remote(*arguments)

        async def cpu_s() -> float:
            return await ask("cpu_s")

        def reports(count: int, apart_s: float):
            one = self._engines.options(session_id=answers[0].replica_id, method_name="reports", stream=True)
            return one.remote(count, apart_s)

        if what == "stream":
            return await cost_of_stream(reports, calls, cpu_s)
        context = np.zeros(CONTEXT_TOKENS, np.int32)
        chunk = ChunkRequest(
            chunk_id="chunk",
            sample_key=0,
            token_ids=context,
            prompt_tokens=500,
            max_tokens=CHUNK_TOKENS,
            sampling=SamplingParams(),
            weights_version=0,
        )
        if what == "call":
            return await cost_of(lambda: ask("nothing"), calls, cpu_s)
        if what == "chunk":
            return await cost_of(lambda: ask("generate_chunk", chunk), calls, cpu_s)
        cost = await cost_of(lambda: poll_all(self._engines, "stats", START_S), max(1, calls // ENGINES))
        return cost | {"replicas": ENGINES, "caller_us_per_replica": round(cost["caller_us"] / ENGINES, 1)}


async def _actors(calls: int) -> dict[str, dict]:
    """Returns the cost of an empty call to a shard of the group context, of an engine's exchange with it, and of an
    actor's items.
    """
    import ray

    from tailrace.deployments.context.shard import ContextShard

    shard = ray.remote(ContextShard).options(num_cpus=0).remote(ContextConfig(), 0)
    groups = [GroupRef(f"batch/{n}", str(n)) for n in range(RUNNING)]
    made, cursors, nothing = 0, [NOWHERE] * RUNNING, Packet.of([])
    tokens = np.zeros(PIECE_TOKENS, np.int32)

    async def exchange() -> None:
        nonlocal made, cursors
        start, made = made, made + PIECE_TOKENS
        packet = Packet.of([Piece(group, 0, start, tokens) for group in groups])
        wants = [Want(*one) for one in zip(groups, cursors, strict=True)]
        _, cursors = await shard.exchange.remote("engine", packet, wants)

    async def empty() -> None:
        await shard.exchange.remote("engine", nothing, [])

    async def cpu_s() -> float:
        return (await shard.status.remote())["cpu_s"]

    sender = ray.remote(Sender).options(num_cpus=0).remote()

    async def reports(count: int, apart_s: float) -> AsyncIterator[tuple[float, bytes]]:
        async for item in sender.reports.remote(count, apart_s):
            yield await item

    return {
        "actor_call": await cost_of(empty, calls, cpu_s),
        "actor_exchange": await cost_of(exchange, calls, cpu_s),
        "actor_stream": await cost_of_stream(reports, calls, sender.cpu_s.remote),
    }
