"""Benchmark of a move of a sample's KV from one engine to another, beside every alternative, in one run.

A sample generates on engine A to a chunk end. It then continues on A (stay), on B with KV from the pool (move), and on
B without KV (recompute). All of them must make the same tokens, or the benchmark fails. Floors are the times to copy as
many bytes in memory and to send them over a loopback socket. Every figure is the best of the repeats: other work on a
shared machine only ever makes a run slower. Deadlines are long, so that operations are measured and not cut short.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailrace.app.errors import Failed
from tailrace.app.model import resolve_model
from tailrace.deployments.messages.chunk import ChunkResult, EngineStats, KvPlan
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.kvpool.pool_config import PoolConfig
from tailrace.lab.benchmarks.pool.heavy_model import heavy_model
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
from tailrace.lab.benchmarks.pool.transport import loopback_ms, memcpy_ms, store_rates
from tailrace.policies.protocol.events import ChunkEnd

PATIENT = {"lookup_deadline_s": 10.0, "load_deadline_s": 5.0, "save_deadline_s": 30.0}
DRAM_GIB = 2.0
KV_CACHE_GIB = 1.0
FIRST_TOKENS, NEXT_TOKENS = 32, 8
"""Tokens of the chunk after which the sample is moved, and of the chunk that continues it."""

KEYS_TRIED = 20
MEASURED = ("stay_ms", "move_ms", "recompute_ms", "save_ms")
FLOORS = ("memcpy_ms", "loopback_ms")


def measure(lengths: tuple[int, ...], repeats: int, say: Callable[[str], None]) -> dict:
    """Returns milliseconds by context length in tokens.

    Raises Failed, in one line, when a move computes more than a block again, or tokens differ.
    """
    demo = resolve_model("demo")
    heavy = heavy_model(demo)
    return run(_measure(demo, heavy, lengths, repeats, say))


async def _measure(demo: Path, heavy: Path, lengths, repeats: int, say) -> dict:
    async with running_pool(PoolConfig(dram_gib=DRAM_GIB, **PATIENT)) as pool:
        result = await _moves("demo", demo, pool, lengths, repeats, say)
        say("store: puts and gets of blocks")
        layout = result["block_bytes"], result["block_pieces"]
        result |= await asyncio.to_thread(store_rates, pool.endpoint, *layout, repeats)
        other = await _moves("heavy", heavy, pool, lengths, repeats, say)
    either = {"demo": result, "heavy": other}
    return result | {
        "heavy": other,
        "break_even_tokens": {name: break_even(of["move_ms"], of["recompute_ms"]) for name, of in either.items()},
        "identical": True,  # else the benchmark has failed above
        "repeats": repeats,
    }


async def _moves(name: str, model: Path, pool: TestbedPool, lengths, repeats: int, say) -> dict:
    say(f"{name}: starting two engines")
    config = EngineConfig(model=str(model), max_model_len=max(lengths) + 128, kv_cache_gib=KV_CACHE_GIB)
    result: dict = {key: {} for key in ("recomputed_tokens", "moved_bytes", *MEASURED, *FLOORS)}
    async with running_engines(config, pool.endpoint) as (a, b):
        stats = await a.stats()
        for length in lengths:
            of_length = await _one_length(a, b, stats, pool, length, repeats)
            of_length["memcpy_ms"] = memcpy_ms(of_length["moved_bytes"], repeats)
            of_length["loopback_ms"] = loopback_ms(of_length["moved_bytes"], repeats)
            for key, value in of_length.items():
                result[key][length] = value
            shown = ", ".join(f"{key.removesuffix('_ms')} {of_length[key]:.0f}" for key in (*MEASURED, *FLOORS))
            say(f"{name}: {length} tokens, ms: {shown}")
    block_bytes = stats.block_tokens * stats.token_bytes
    return result | {"block_bytes": block_bytes, "block_pieces": _pieces(model)}


async def _one_length(
    a: TestbedEngine, b: TestbedEngine, stats: EngineStats, pool: TestbedPool, length: int, repeats: int
) -> dict:
    sample = await _sample(a, length)
    best = dict.fromkeys(MEASURED, float("inf"))
    for _ in range(repeats):
        times = {}
        # Saves the whole context: the pool has no part of it yet.
        stayed, times["stay_ms"], times["save_ms"] = await sample.go_on(a, "stay", KvPlan(0, None))
        await b.forget()
        moved, times["move_ms"], _ = await sample.go_on(b, "move", KvPlan(0, save=False))
        await b.forget()
        _, times["recompute_ms"], _ = await sample.go_on(b, "recompute", KvPlan(0, None, save=False))
        await give_back(pool, keys_of(stats, stayed.kv_names))
        if moved.computed_tokens > stats.block_tokens:
            again = f"{moved.computed_tokens} of {length} tokens ({moved.recompute_cause})"
            raise Failed(f"a move computed {again} again, more than a block of {stats.block_tokens}")
        best = {key: min(best[key], times[key]) for key in MEASURED}
    counts = {"recomputed_tokens": moved.computed_tokens, "moved_bytes": moved.pulled_tokens * stats.token_bytes}
    return best | counts


@dataclass(frozen=True)
class TimedSample:
    """A sample at a chunk end. `next_tokens`: tokens with which it must continue."""

    context: np.ndarray
    key: int
    next_tokens: np.ndarray

    async def go_on(self, engine: TestbedEngine, how: str, kv: KvPlan) -> tuple[ChunkResult, float, float]:
        """Runs the next chunk. Returns its result, the milliseconds to the first token, and the milliseconds from the
        last token until the KV was saved. Raises Failed if the tokens differ from `next_tokens`.
        """
        length = len(self.context)
        chunk = chunk_of(f"{length}-{how}", self.key, self.context, length - FIRST_TOKENS, NEXT_TOKENS, kv)
        [(result, took_s)] = await engine.run([chunk])
        if not np.array_equal(result.token_ids, self.next_tokens):
            raise Failed(f"a sample of {length} tokens went on with other tokens ({how})")
        first_s = result.queue_s + result.prefill_s
        return result, round(1e3 * first_s, 2), round(1e3 * (took_s - first_s - result.decode_s), 2)


async def _sample(engine: TestbedEngine, length: int) -> TimedSample:
    """Returns a sample of `length` tokens that the engine has made. Raises Failed if no sample of KEYS_TRIED lasts long
    enough.
    """
    prompt = np.random.default_rng(length).integers(1_000, 40_000, length - FIRST_TOKENS).astype(np.int32)
    for key in range(KEYS_TRIED):
        chunk = chunk_of(f"{length}-first", key, prompt, len(prompt), FIRST_TOKENS + NEXT_TOKENS, None)
        [(result, _)] = await engine.run([chunk])
        if result.end is ChunkEnd.LENGTH:
            made, next_tokens = np.split(result.token_ids, [FIRST_TOKENS])
            return TimedSample(np.concatenate([prompt, made]), key, next_tokens)
    raise Failed(f"none of {KEYS_TRIED} samples after {len(prompt)} tokens lasted {FIRST_TOKENS + NEXT_TOKENS} tokens")


def tables(result: dict) -> list:
    """Returns the result as rich tables."""
    from rich.table import Table

    times = Table("model", "tokens", *(key.removesuffix("_ms") for key in (*MEASURED, *FLOORS)), "recomputed")
    times.title = "milliseconds until the next token; until its KV is saved; of the same bytes"
    for name, of in (("demo", result), ("heavy", result["heavy"])):
        for length, tokens in of["recomputed_tokens"].items():
            times.add_row(name, f"{length}", *(f"{of[key][length]:.1f}" for key in (*MEASURED, *FLOORS)), f"{tokens}")
    least = ", ".join(f"{name} {tokens}" for name, tokens in result["break_even_tokens"].items())
    times.caption = f"moving is quicker than computing again from this context length on: {least}"
    rates = Table("in flight", "put MB/s", "get MB/s")
    rates.title = f"the store, blocks of {result['block_bytes']:,} bytes in {result['block_pieces']} pieces"
    for in_flight, put in result["put_mb_s"].items():
        rates.add_row(str(in_flight), str(put), str(result["get_mb_s"][in_flight]))
    return [times, rates]


def break_even(move_ms: dict[int, float], recompute_ms: dict[int, float]) -> float | None:
    """Returns the context length, in tokens, from which on a move is quicker than a recomputation: 0 if it always is,
    None if it never is or if there is only one length. Both times are taken as linear in the length.

    Relative errors are fitted: the break-even lies among the short contexts, whose times are small.
    """
    if len(move_ms) < 2:
        return None
    move_base, move_slope = _line(move_ms)
    base, slope = _line(recompute_ms)
    if np.isclose(slope, move_slope):
        return 0.0 if base > move_base else None
    if slope < move_slope:
        return None
    return round(max(0.0, (move_base - base) / (slope - move_slope)), 1)


def _line(times_ms: dict[int, float]) -> tuple[float, float]:
    """Returns the milliseconds at 0 tokens, and those per token."""
    times = np.array(list(times_ms.values()))
    slope, base = np.polyfit(np.array(list(times_ms), float), times, 1, w=1 / times)
    return float(base), float(slope)


def _pieces(model: Path) -> int:
    """Returns the number of pieces of a block of KV: keys and values of every layer lie apart."""
    return 2 * json.loads((model / "config.json").read_text())["num_hidden_layers"]
