"""Benchmark of a chunk of 8,192 tokens, there and back over a line between two processes: loopback, encrypted.

The other process has an engine's end of the line; its engine does nothing. Called by
lab/benchmarks/control_plane/control.py.
"""

import asyncio
import time
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import numpy as np

from tailrace.deployments.channel.coordinator_lines import CoordinatorLines
from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.engine_line import EngineLine
from tailrace.deployments.channel.sockets import DialledSocket, ListeningSocket
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.lab.benchmarks.control_plane.rpc_latency import cost_of
from tailrace.policies.protocol.events import ChunkEnd

HOST, REPLICA = "127.0.0.1", "r1"
CHUNK_TOKENS, CONTEXT_TOKENS = 8_192, 10_000
START_S = 60.0


def measure(calls: int) -> dict:
    """Returns round trips, chunks per second, and processor time of each end. Raises TimeoutError if the engine's end
    does not connect within START_S.
    """
    return asyncio.run(_measure(calls))


async def _measure(calls: int) -> dict:
    up = asyncio.Event()
    lines = CoordinatorLines(partial(ListeningSocket, HOST), up.set, "bench")
    context = get_context("spawn")
    used_s = context.Value("d")
    engine = context.Process(target=_engine, args=(tuple(lines.address), lines.open(REPLICA), used_s), daemon=True)
    engine.start()
    try:
        async with asyncio.timeout(START_S):
            await up.wait()
        tokens = np.zeros(CONTEXT_TOKENS, np.int32)
        chunk = ChunkRequest(
            chunk_id="chunk",
            sample_key=0,
            token_ids=tokens,
            prompt_tokens=500,
            max_tokens=CHUNK_TOKENS,
            sampling=SamplingParams(),
            weights_version=0,
        )
        numbers = iter(range(1 << 30))

        async def engine_s() -> float:
            return used_s.value

        return await cost_of(
            lambda: lines.run(REPLICA, replace(chunk, chunk_id=f"chunk-{next(numbers)}")), calls, engine_s
        )
    finally:
        engine.terminate()
        engine.join()


class _IdleEngine:
    """An engine that answers at once."""

    def __init__(self, used_s):
        self._used_s = used_s
        tokens = np.zeros(CHUNK_TOKENS, np.int32)
        logprobs = tokens.astype(np.float32)
        self._result = ChunkResult(
            chunk_id="",
            token_ids=tokens,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            end=ChunkEnd.LENGTH,
            weights_version=0,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            cached_tokens=0,
            computed_tokens=0,
        )

    async def generate_chunk(self, chunk: ChunkRequest) -> ChunkResult:
        self._used_s.value = time.process_time()
        return replace(self._result, chunk_id=chunk.chunk_id)

    async def abort(self, chunk_id: str, keep_kv: bool) -> None:
        """Does nothing: every chunk has been answered."""

    async def stats(self) -> EngineStats:
        return EngineStats(
            replica_id=REPLICA,
            weights_version=0,
            block_tokens=32,
            kv_capacity_blocks=10_000,
            max_running=64,
            max_model_len=40_000,
            draft_tokens=16,
            observed_at=time.time(),
        )


def _engine(address: tuple[str, bytes], session: str, used_s) -> None:
    async def hold() -> None:
        await EngineLine(session, _IdleEngine(used_s), partial(DialledSocket, Address(*address), session)).hold()

    asyncio.run(hold())
