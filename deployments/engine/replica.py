"""The engine as a Serve deployment: a thin asyncio shell around one EngineRunner.

Invariant: a call ends when its chunk ends, and a cancelled call aborts its chunk.
No tokens are therefore generated for a caller that has left.
`handle.options(session_id=replica_id)` addresses a replica, see deployments/router.py.
Called by the coordinator. A broken engine fails the health check, and Serve replaces the replica.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ReplicaRank

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.engine_line import EngineLine
from tailrace.deployments.channel.sockets import DialledSocket
from tailrace.deployments.context.actors import ensure_context
from tailrace.deployments.context.context_client import ContextClient
from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.drafter.client import Drafters
from tailrace.deployments.drafter.discovery import watch
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.engine.chunk_trace import trace_chunk
from tailrace.deployments.engine.runner import EngineRunner
from tailrace.deployments.engine.shared_features import with_features
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.command import (
    CheckWeights,
    Command,
    FallAsleep,
    LoadWeights,
    RejoinPool,
    TakeSpans,
    TransferWeights,
    WakeKv,
)
from tailrace.deployments.serve_port import keep_serve_port_on_node
from tailrace.deployments.staging.slots import is_memory, memory_source
from tailrace.deployments.staging.weights_memory import WeightsMemory
from tailrace.deployments.telemetry import Telemetry
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.deployments.vllm_exact.launch import bound_cores, rebind
from tailrace.kvpool.pool import follow_pool, join_pool
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.kvpool.status import PoolDown


@serve.deployment(
    # The coordinator admits chunks: a call that waits in Serve would look like a slow chunk. 2^16 is "no limit".
    max_ongoing_requests=65_536,
    health_check_period_s=2,
    graceful_shutdown_wait_loop_s=0.2,  # another replica waits for its core; Serve's default is 2 s
    request_router_config=RequestRouterConfig(request_router_class="tailrace.deployments.router:AddressedRouter"),
)
class Engine:
    """One engine replica. `otlp`: export spans to the collector in the OTEL_* variables of the replica's process.

    `drafter`, `drafters`: configuration of draft models, and the handle of their deployment.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights_version: int = 0,
        otlp: bool = False,
        pool: PoolConfig | None = None,
        context: ContextConfig | None = None,
        drafter: DrafterConfig | None = None,
        drafters: DeploymentHandle | None = None,
    ):
        keep_serve_port_on_node()
        here = serve.get_replica_context()
        endpoint, self._pool_problem = None, ""
        if pool is not None:
            try:
                endpoint = join_pool(pool, here.app_name)
            except PoolDown as error:  # the pool is a cache: without it every move recomputes
                self._pool_problem = str(error)
        self._node_id = ray.get_runtime_context().get_node_id()
        # `local_rank` is unique among the running replicas of this deployment on this node; see `reconfigure`.
        self._config, self._rank = config, here.rank.local_rank
        name, feed = here.replica_id.unique_id, None
        if context is not None and config.draft.method == "group":
            feed = ContextClient(ensure_context(context, here.app_name), context, name)
        model = None if drafter is None else Drafters(drafter)
        self._runner = EngineRunner(
            config=config,
            replica_id=name,
            weights_version=weights_version,
            rank=self._rank,
            pool=endpoint,
            feed=feed,
            model=model,
        )
        if model is not None:
            self._watching = asyncio.get_running_loop().create_task(watch(drafters, model))
        if endpoint is not None:
            follow = follow_pool(pool, here.app_name, endpoint, self._rejoin_pool)
            self._following = asyncio.get_running_loop().create_task(follow)
        self._weights_memory = WeightsMemory(None if endpoint is None else pool, here.app_name)
        self._started_at = time.time()
        self._telemetry = Telemetry("tailrace-engine", otlp, instance=name)
        self._line: EngineLine | None = None

    def reconfigure(self, user_config: None, rank: ReplicaRank) -> None:
        """Takes a new rank from Serve: a remaining replica may get the rank of a stopped one."""
        rebind(self._config, self._rank, rank.local_rank)
        self._rank = rank.local_rank

    async def hold_line(self, address: Address, session: str, again: bool = False) -> None:
        """Takes chunks over a line from a coordinator until it is gone, or another coordinator opens a line.

        `again`: hold the line only if this session still has one.
        """
        if not again:
            if self._line is not None:
                self._line.close()
            self._line = self._dial(address, session)
        if self._line is not None and self._line.session == session and not self._line.closed:
            await self._line.hold()

    def _dial(self, address: Address, session: str) -> EngineLine:
        return EngineLine(session, self, partial(DialledSocket, address, session))

    def _report(self) -> None:
        """Sends a report at once, since the coordinator waits for a change."""
        if self._line is not None:
            self._line.report()

    async def generate_chunk(self, chunk: ChunkRequest) -> ChunkResult:
        """Runs a chunk to its end. Raises ValueError if it is refused, EngineDown if the engine breaks."""
        loop, chunk = asyncio.get_running_loop(), await with_features(chunk)
        answer: asyncio.Future[ChunkResult] = loop.create_future()

        def settle(result: ChunkResult | Exception) -> None:
            if answer.done():  # the caller has left in the meantime
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        started_ns = time.time_ns()
        self._runner.submit(chunk, lambda result: loop.call_soon_threadsafe(settle, result))
        try:
            result = await answer
        finally:
            if answer.cancelled():
                self._runner.abort(chunk.chunk_id)
        trace_chunk(self._telemetry, self._runner.stats().replica_id, chunk, result, started_ns)
        return result

    async def abort(self, chunk_id: str, keep_kv: bool = False) -> None:
        """Ends a chunk at the next token; its own call, which may come later, returns the tokens so far."""
        self._runner.abort(chunk_id, keep_kv)

    async def _rejoin_pool(self, master_address: str) -> None:
        await self.obey(RejoinPool(master_address))

    async def obey(self, command: Command) -> Any:
        """Does a command; its type says what the answer is. Raises ValueError, one line, when it is refused, and
        EngineDown when the engine is down."""
        match command:
            case TakeSpans(trace_id):
                return self._telemetry.take(trace_id)
            case LoadWeights() | CheckWeights():
                await self._fetch(command.source)
            case FallAsleep():
                await self._fetch(self._runner.stats().weights_source)
            case TransferWeights(transfer):
                service = await asyncio.to_thread(self._weights_memory.own_slots)
                command = TransferWeights(replace(transfer, service=service))
        answer = await asyncio.wrap_future(self._runner.ask(command))
        if isinstance(command, CheckWeights):
            if answer is not None:
                raise ValueError(answer)
            return await asyncio.to_thread(self._checked_digest, command.source)
        if isinstance(command, LoadWeights | FallAsleep | WakeKv):
            self._report()
        return answer

    async def _fetch(self, source: str) -> None:
        """Copies weights in memory to this node, and verifies them. Raises ValueError, one line."""
        if is_memory(source):
            await asyncio.to_thread(self._weights_memory.fetch, memory_source(source))

    def _checked_digest(self, source: str) -> str:
        from tailrace.deployments.vllm_exact.weight_loading import checked_digest

        return checked_digest(source)

    async def stats(self) -> EngineStats:
        """Returns the latest snapshot. Raises when the engine is down, so that no caller relies on this replica."""
        self.check_health()
        return replace(
            self._runner.stats(),
            node_id=self._node_id,
            cores=bound_cores(self._config, self._rank),
            started_at=self._started_at,
            pool_problem=self._pool_problem,
            weights_pause_s=self._runner.weights_pause_s,
            dtype=self._config.dtype,
            ranks=self._config.tensor_parallel,
            weight_transfer=self._config.weight_transfer,
        )

    def check_health(self) -> None:
        """Raises when the engine is down or a step does not end. Called by Serve, which then replaces the replica."""
        if not self._runner.healthy:
            raise RuntimeError(f"the engine is down: {self._runner.problem}")

    def __del__(self):
        # Serve calls this after the calls in flight have ended; the constructor may have failed before.
        if hasattr(self, "_telemetry"):
            self._runner.stop()
            self._telemetry.close()
