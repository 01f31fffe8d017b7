"""Moves a sample's KV from the device to the pool's memory on this machine and back, by our connector, in one
engine.
"""

import asyncio
import threading
import time
from importlib.util import find_spec

import numpy as np

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, KvPlan, sample_key
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.lab.benchmarks.gpu.measurements import Measurements
from tailrace.lab.benchmarks.gpu.steps.ours import started

SHAPE = "1.7B"
CONTEXTS = (500, 2000, 3900)
PATIENT = {"lookup_deadline_s": 10.0, "load_deadline_s": 20.0, "save_deadline_s": 30.0}
START_S = 60.0


def pool(step: Measurements) -> None:
    if find_spec("mooncake") is None:
        return step.say("pool", skipped="Mooncake is not installed")
    config = PoolConfig(
        **PATIENT, **step.place.of({"dram_gib": 16.0, "buffer_mib": 512}, {"dram_gib": 0.25, "buffer_mib": 64})
    )
    keeper = PoolKeeper(config)
    try:
        step.must("start of the pool", keeper.wait)
        case = MovedSamples(step, keeper.endpoint)
        for context in step.place.of(CONTEXTS, (60,)):
            step.tried(f"{context} tokens", lambda context=context: case.moved(context))
    finally:
        keeper.stop()


class PoolKeeper:
    """A pool on a thread of its own."""

    def __init__(self, config: PoolConfig):
        self._up, self._end = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.endpoint: PoolEndpoint | None = None
        self._thread = threading.Thread(target=self._run, args=(config,), daemon=True)
        self._thread.start()

    def _run(self, config: PoolConfig) -> None:
        try:
            asyncio.run(self._keep(config))
        except Exception as error:  # noqa: BLE001 - `wait` raises the error on the caller's thread
            self._error = error
        finally:
            self._up.set()

    async def _keep(self, config: PoolConfig) -> None:
        from tailrace.lab.benchmarks.pool.pool_testbed import running_pool

        async with running_pool(config) as found:
            self.endpoint = found.endpoint
            self._up.set()
            while not self._end.is_set():
                await asyncio.sleep(0.1)

    def wait(self) -> dict:
        """Waits until the pool has started. Returns the seconds that this took. Raises the pool's error, or
        TimeoutError after START_S.
        """
        began_s = time.perf_counter()
        if not self._up.wait(START_S):
            raise TimeoutError(f"no pool after {START_S:.0f} s")
        if self._error is not None:
            raise self._error
        return {"start_s": time.perf_counter() - began_s}

    def stop(self) -> None:
        self._end.set()
        self._thread.join(20)


class MovedSamples:
    """Samples that continue with their KV in the engine, with their KV from the pool, or with their KV
    computed again.
    """

    def __init__(self, step: Measurements, endpoint: PoolEndpoint):
        self._engine = started(step, SHAPE, pool=endpoint, eager=True, draft="off", running=16)
        self._first, self._more = step.place.of((16, 32), (4, 4))

    def moved(self, length: int) -> dict:
        """Saves the KV of a prompt of `length` tokens and a few generated ones, then continues the sample in each of
        the three ways. Returns times, tokens moved, and whether the three answers are equal.
        """
        stepper = self._engine.stepper
        prompt = np.random.default_rng(length).integers(3, stepper._requests.vocabulary, length, np.int32)
        saved, took_s = self._run("first", prompt, length, self._first, KvPlan(0, None))
        context = np.concatenate([prompt, saved.token_ids]).astype(np.int32)
        ways = {"stay": KvPlan(0, None, save=False), "move": KvPlan(0, save=False)}
        ways["recompute"] = KvPlan(0, None, save=False)
        found: dict[str, ChunkResult] = {}
        for way, plan in ways.items():
            if way != "stay":
                stepper.reset_cache()
            found[way], _ = self._run(way, context, length, self._more, plan)
        moved, tokens = found["move"], [each.token_ids.tolist() for each in found.values()]
        return {
            "first_token_ms": {way: round(1e3 * (each.queue_s + each.prefill_s), 2) for way, each in found.items()},
            "save_ms": round(1e3 * (took_s - saved.queue_s - saved.prefill_s - saved.decode_s), 2),
            "pulled_tokens": moved.pulled_tokens,
            "computed_tokens": moved.computed_tokens,
            "cause": moved.recompute_cause,
            "pulled_mib": moved.pulled_tokens * stepper._pool.token_bytes / 2**20,
            "same_tokens": all(each == tokens[0] for each in tokens),
        }

    def _run(self, way: str, context, length: int, count: int, plan: KvPlan) -> tuple[ChunkResult, float]:
        name, key = f"{length}-{way}", sample_key(1, 0, "p", length)
        chunk = ChunkRequest(
            chunk_id=name,
            sample_key=key,
            token_ids=context,
            prompt_tokens=length,
            max_tokens=count,
            sampling=SamplingParams(ignore_eos=True),
            weights_version=0,
            kv=plan,
        )
        began_s = time.perf_counter()
        return self._engine.run([chunk])[name], time.perf_counter() - began_s
