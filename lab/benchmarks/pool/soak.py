"""Benchmark of samples that move between two engines at every chunk end, thousands of times: memory of every process.

In a round every sample in flight runs one chunk; then all samples change engines. Local caches are emptied before each
round, so that a move can find KV only in the pool. When a sample ends, its keys are removed, as by the coordinator, and
a new sample begins.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tailrace.app.model import resolve_model
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, KvPlan
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.lab.benchmarks.pool.pool_testbed import (
    TestbedEngine,
    TestbedPool,
    chunk_of,
    give_back,
    keys_of,
    run,
    running_engines,
    running_pool,
)
from tailrace.lab.benchmarks.pool.transport import write_everywhere
from tailrace.policies.models.hashed_random import fraction
from tailrace.policies.protocol.events import ChunkEnd

CHUNK_TOKENS = 8
IN_FLIGHT = 8
PROMPT_TOKENS, MOST_NEW_TOKENS = 200, 400
SAMPLED_MOVES, SHOWN_MOVES, SETTLED_MOVES = 50, 100, 100
FLAT_PERCENT = 5.0
"""Maximum change of a process's resident memory after the first SETTLED_MOVES moves, in percent."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KV_CACHE_GIB = 0.25
POOL = PoolConfig(dram_gib=0.5, load_deadline_s=10.0, save_deadline_s=10.0)


@dataclass(eq=False)
class SoakSample:
    """One sample in flight. `side`: index of the engine that runs it next."""

    number: int
    side: int
    tokens: np.ndarray = field(init=False)
    most_tokens: int = field(init=False)
    chunks: int = 0
    kv_names: bytes = b""

    def __post_init__(self):
        self.tokens = np.random.default_rng(self.number).integers(1_000, 40_000, PROMPT_TOKENS).astype(np.int32)
        self.most_tokens = PROMPT_TOKENS + CHUNK_TOKENS + int(MOST_NEW_TOKENS * fraction(0, f"soak-{self.number}"))

    def chunk(self) -> ChunkRequest:
        goes_on = len(self.tokens) + CHUNK_TOKENS < self.most_tokens
        kv = KvPlan(0, 1 if self.chunks else None, goes_on)
        name = f"sample-{self.number}-{self.chunks}"
        return chunk_of(name, self.number, self.tokens, PROMPT_TOKENS, CHUNK_TOKENS, kv)

    def take(self, result: ChunkResult) -> bool:
        """Adds a chunk's result to the sample, which changes sides. Returns whether the sample continues."""
        self.tokens = np.concatenate([self.tokens, result.token_ids])
        self.kv_names, self.chunks, self.side = result.kv_names, self.chunks + 1, 1 - self.side
        return result.end is ChunkEnd.LENGTH and len(self.tokens) < self.most_tokens


class Watch:
    """Resident memory of processes, read every SAMPLED_MOVES moves and shown every SHOWN_MOVES moves."""

    def __init__(self, pids: dict[str, int], say: Callable[[str], None]):
        self._pids, self._say = pids, say
        self._began_s = time.monotonic()
        self.seen: dict[int, dict[str, int]] = {}  # moves -> process -> bytes

    def look(self, moves: int) -> None:
        if moves // SAMPLED_MOVES <= max(self.seen, default=-1) // SAMPLED_MOVES:
            return
        if moves // SHOWN_MOVES > max(self.seen, default=0) // SHOWN_MOVES:
            rate = moves / (time.monotonic() - self._began_s)
            resident = ", ".join(f"{name} {resident_bytes(pid) / 2**20:.1f}" for name, pid in self._pids.items())
            self._say(f"{moves} moves, {rate:.1f}/s; resident MiB: {resident}")
        self.seen[moves] = {name: resident_bytes(pid) for name, pid in self._pids.items()}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def growth_percent(seen: dict[int, dict[str, int]], settled_moves: int) -> dict[str, float]:
    """Returns, by process, the growth of resident memory in percent, from the first look after `settled_moves` moves to
    the last look.
    """
    first, last = next(seen[moves] for moves in sorted(seen) if moves >= settled_moves), seen[max(seen)]
    return {name: round(100 * (last[name] / first[name] - 1), 2) for name in last}


def measure(moves: int, say: Callable[[str], None]) -> dict:
    """Returns the resident bytes by number of moves and process, their growth, and the number of moves by outcome."""
    return run(_measure(moves, say))


async def _measure(moves: int, say: Callable[[str], None]) -> dict:
    config = EngineConfig(model=str(resolve_model("demo")), max_model_len=1024, kv_cache_gib=KV_CACHE_GIB)
    say("starting a pool and two engines")
    async with running_pool(POOL) as pool, running_engines(config, pool.endpoint) as engines:
        await asyncio.to_thread(write_everywhere, pool.endpoint)  # else the store grows by new pages
        status = await pool.master.status()
        pids = {f"engine-{rank}": await engine.pid() for rank, engine in enumerate(engines)}
        watch = Watch(pids | {"store": status.store_nodes[0].pid, "master": status.master_pid}, say)
        samples = [SoakSample(number, number % 2) for number in range(IN_FLIGHT)]
        counts: Counter[str] = Counter()
        while counts.total() < moves:
            await _round(engines, pool, samples, counts)
            watch.look(counts.total())
        await _release(engines[0], pool, samples)
        growth = growth_percent(watch.seen, SETTLED_MOVES)
        return {
            "moves": counts.total(),
            "moves_by_outcome": dict(counts),
            "samples": max(sample.number for sample in samples) + 1,
            "resident_bytes": watch.seen,
            "growth_percent": growth,
            "flat": max(map(abs, growth.values())) <= FLAT_PERCENT,
            "keys_left": (await pool.master.status()).keys,
        }


async def _round(
    engines: tuple[TestbedEngine, TestbedEngine], pool: TestbedPool, samples: list[SoakSample], counts: Counter
) -> None:
    """Runs one chunk of every sample. A sample that ends is replaced by a new one at its place in the list."""
    sides = [[sample for sample in samples if sample.side == side] for side in (0, 1)]
    await asyncio.gather(*(engine.forget() for engine in engines))
    chunks = [[sample.chunk() for sample in side] for side in sides]
    ran = await asyncio.gather(*(engine.run(of_side) for engine, of_side in zip(engines, chunks, strict=True)))
    ended = []
    for sample, (result, _) in zip(sides[0] + sides[1], ran[0] + ran[1], strict=True):
        if sample.chunks:
            counts["pulled" if result.pulled_tokens else f"not_pulled.{result.recompute_cause}"] += 1
        if not sample.take(result):
            ended.append(sample)
    await _release(engines[0], pool, ended)
    number = max(sample.number for sample in samples)
    for sample in ended:
        number += 1
        samples[samples.index(sample)] = SoakSample(number, sample.side)


async def _release(engine: TestbedEngine, pool: TestbedPool, samples: list[SoakSample]) -> None:
    """Removes the keys of these samples from the pool."""
    names = b"".join(sample.kv_names for sample in samples)
    await give_back(pool, keys_of(await engine.stats(), names))
