"""A KV pool and engines around it, without Ray, for the benchmarks of the pool.

Every engine is a process of its own, bound to its own core, as a replica is. Invariant: what was started is stopped,
and nothing outlives this process. Called by lab/benchmarks/pool/kvpool.py and soak.py; its pool alone also by other
benchmarks and by live tests.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

from tailrace.app.errors import Failed
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats, KvPlan
from tailrace.deployments.messages.command import ResetCache
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.keys import NAME_BYTES
from tailrace.kvpool.master import KvMaster
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.kvpool.programs import free_port
from tailrace.kvpool.status import PoolDown
from tailrace.kvpool.store_node import KvStoreNode

HOST = "127.0.0.1"
MOUNT_S = 30.0

_runner: Any = None
"""The EngineRunner of an engine's process; None in other processes."""


def run(work: Coroutine[Any, Any, dict]) -> dict:
    """Returns what a benchmark's coroutine returns. Raises Failed, in one line, when the pool or an engine does not
    start, or dies.
    """
    try:
        return asyncio.run(work)
    except PoolDown as error:
        raise Failed(str(error)) from None
    except BrokenProcessPool:
        raise Failed("the process of an engine did not start, or died; see what it wrote above") from None


@dataclass(frozen=True)
class TestbedPool:
    """A master and one store node, on loopback."""

    master: KvMaster
    endpoint: PoolEndpoint


@asynccontextmanager
async def running_pool(config: PoolConfig) -> AsyncIterator[TestbedPool]:
    """Yields a running pool. Raises PoolDown, in one line, when the pool's memory is not mounted after MOUNT_S."""
    os.environ.update(MC_LOG_LEVEL="ERROR")  # for Mooncake's clients here and in the processes started from here
    master = KvMaster(config, HOST, free_port(HOST), free_port(HOST))
    node = KvStoreNode(
        config=config,
        node_id="node",
        master_address=master.address,
        host=HOST,
        port=free_port(HOST),
        report=master.report,
    )
    reporting = asyncio.create_task(node.run())
    try:
        yield TestbedPool(master, await node.endpoint(MOUNT_S))
    finally:
        reporting.cancel()
        await node.stop()
        await master.stop()


class TestbedEngine:
    """One engine in a process of its own, which answers one call at a time."""

    def __init__(self, config: EngineConfig, rank: int, pool: PoolEndpoint):
        arguments = (config, rank, pool)
        self._process = ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=arguments)

    async def run(self, chunks: list[ChunkRequest]) -> list[tuple[ChunkResult, float]]:
        """Runs chunks, all at once. Returns each result, and the seconds from the submission until the engine gave the
        result, saves included.
        """
        return await self._ask(_run, chunks)

    async def forget(self) -> None:
        """Empties the local prefix cache. Raises RuntimeError if the cache is in use."""
        await self._ask(_forget)

    async def stats(self) -> EngineStats:
        return await self._ask(_stats)

    async def pid(self) -> int:
        return await self._ask(os.getpid)

    async def stop(self) -> None:
        await asyncio.to_thread(self._process.shutdown, cancel_futures=True)

    async def _ask(self, function: Callable, *arguments) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._process, function, *arguments)


@asynccontextmanager
async def running_engines(
    config: EngineConfig, pool: PoolEndpoint
) -> AsyncIterator[tuple[TestbedEngine, TestbedEngine]]:
    """Yields two engines that share the pool. Raises BrokenProcessPool when one does not start; its process writes the
    cause to stderr.
    """
    engines = TestbedEngine(config, 0, pool), TestbedEngine(config, 1, pool)
    try:
        await asyncio.gather(*(engine.pid() for engine in engines))
        yield engines
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def give_back(pool: "TestbedPool", keys: list[str]) -> None:
    """Removes keys from the pool. Returns once all are removed: keys in use are retried until they are free."""
    while keys:
        _, keys = await pool.master.release(keys)
        await asyncio.sleep(0.2 if keys else 0)


def keys_of(stats: EngineStats, names: bytes) -> list[str]:
    """Returns all keys under which the pool keeps the blocks that a result names."""
    blocks = [names[i : i + NAME_BYTES].hex() for i in range(0, len(names), NAME_BYTES)]
    return [f"{prefix}@{block}" for prefix in stats.key_prefixes for block in blocks]


def chunk_of(chunk_id: str, key: int, tokens, prompt_tokens: int, max_tokens: int, kv: KvPlan | None) -> ChunkRequest:
    """Returns a chunk for weights version 0, at temperature 1 and without filters."""
    return ChunkRequest(
        chunk_id=chunk_id,
        sample_key=key,
        token_ids=tokens,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        weights_version=0,
        kv=kv,
    )


# ---- in the process of an engine -----------------------------------------------------------------------


def _start(config: EngineConfig, rank: int, pool: PoolEndpoint) -> None:
    global _runner  # noqa: PLW0603 - a worker process has no other place for what its calls share
    Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout, which belongs to the result
    from tailrace.deployments.engine.runner import EngineRunner

    _runner = EngineRunner(config, f"engine-{rank}", 0, rank, pool)


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)  # the queue that this process waits for does not notice that nobody writes to it any more


def _run(chunks: list[ChunkRequest]) -> list[tuple[ChunkResult, float]]:
    answers: list[Future] = [Future() for _ in chunks]
    began_s = time.monotonic()
    for chunk, answer in zip(chunks, answers, strict=True):
        _runner.submit(chunk, lambda result, answer=answer: answer.set_result((result, time.monotonic() - began_s)))
    results = [answer.result() for answer in answers]
    for result, _ in results:
        if isinstance(result, Exception):
            raise result
    return results


def _forget() -> None:
    if not _runner.ask(ResetCache()).result():
        raise RuntimeError("the engine's cache is in use and cannot be forgotten")


def _stats() -> EngineStats:
    return _runner.stats()
