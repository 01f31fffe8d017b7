"""A coordinator whose records of samples, deliveries and Serve stream are real, and which has no other parts.

It makes the chunks of a batch's samples itself, as replicas would send them, ends the samples and delivers the groups.
Its memory is that of its own pages: those of Ray's object store, which it maps, are counted at the driver. Called by
lab/benchmarks/control_plane/results.py through a Serve handle.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import groupby

import numpy as np

from tailrace.deployments.batches.deliveries import Deliveries, Delivery
from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.messages.rollout import GroupResult, Rejected, RolloutBatch
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.protocol.actions import EndSample, SampleEnd
from tailrace.policies.protocol.events import ChunkEnd

CHUNK_TOKENS = 2_048
WATCH_S = 0.02
VOCABULARY = 40_000
"""Number of token ids that are drawn from; the demo model has a few more."""


class PeakMemory:
    """Peak memory of this process, in bytes of its own pages. A thread reads the memory every WATCH_S."""

    def __init__(self):
        self.bytes = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident_bytes("RssAnon"))
            time.sleep(WATCH_S)


def resident_bytes(*kinds: str) -> int:
    """Returns the resident bytes of this process, summed over some of the kernel's kinds. RssAnon: its own pages.
    RssShmem: pages of Ray's object store.
    """
    with open("/proc/self/status") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(found[kind].split()[0]) for kind in kinds)


class LoopWatch:
    """Longest time for which another callback held the running event loop while `watch` ran.

    `held_s`: by the clock, other threads and processes included. `held_cpu_s`: by the processor time of the loop's
    thread.
    """

    def __init__(self):
        self.held_s = self.held_cpu_s = 0.0

    async def watch(self, seconds: float) -> None:
        until = time.perf_counter() + seconds
        while (now := time.perf_counter()) < until:
            cpu = time.thread_time()
            await asyncio.sleep(0)
            self.held_s = max(self.held_s, time.perf_counter() - now)
            self.held_cpu_s = max(self.held_cpu_s, time.thread_time() - cpu)


class ResultSource:
    """The coordinator of the module docstring. `model`: a model's folder, for its tokenizer, or its Prompts."""

    def __init__(self, model: str | Prompts):
        self._prompts = Prompts(model, 1 << 20) if isinstance(model, str) else model
        self._deliveries = Deliveries(self._submit, lambda delivery: False, self._no_refusal, time.monotonic)
        self._telemetry, self._memory = Telemetry("bench-results"), PeakMemory()
        self._tasks: set[asyncio.Task] = set()
        self._chance = np.random.default_rng(0)
        self._submissions, self._ended_s, self._watch_s, self._loop = 0, 0.0, 0.0, LoopWatch()

    async def rollout(
        self, role: Role, message: RolloutBatch, driver: str, have: list[str], cancelled: bool = False
    ) -> AsyncIterator[GroupResult | Rejected]:
        async with aclosing(self._deliveries.read(message, driver, have, cancelled)) as items:
            async for item in items:
                yield item

    async def model_folder(self, role: Role) -> str:
        return self._prompts.model

    async def renew(self, role: Role, batch_id: str, driver: str, taken: int) -> None:
        self._deliveries.renew(batch_id, driver, taken)

    async def watch(self, seconds: float) -> None:
        """Watches the loop for `seconds`, from the last chunks of the next batch on."""
        self._watch_s, self._loop = seconds, LoopWatch()

    async def seen(self) -> dict[str, float]:
        """Returns the figures so far. `ended_s`: unix time of the latest chunk, which ends the last sample of a batch.
        `held_ms` and `held_cpu_ms` are those since the last call of `watch`.
        """
        return {
            "ended_s": self._ended_s,
            "held_ms": 1e3 * self._loop.held_s,
            "held_cpu_ms": 1e3 * self._loop.held_cpu_s,
            "peak_bytes": self._memory.bytes,
        }

    async def _no_refusal(self, message: RolloutBatch) -> None:
        """Refuses no batch."""

    async def _submit(self, message: RolloutBatch, delivery: Delivery, _cancels: int) -> None:
        prepared = await asyncio.to_thread(self._prompts.prepare, message)
        batch = LiveBatch(
            message=message,
            core_id=f"bench-{self._submissions}",
            delivery=delivery,
            prepared=prepared,
            past={},
            submitted_s=time.monotonic(),
        )
        self._submissions += 1
        batch.open_spans(self._telemetry, "bench-results")
        task = asyncio.ensure_future(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: LiveBatch) -> None:
        """Runs all samples together, a chunk of each in turn. A sample ends with the `max_tokens` of its group."""
        longest = max(one.group.max_tokens for one in batch.groups.values())
        for start in range(0, longest, CHUNK_TOKENS):
            running = [name for name, one in batch.samples.items() if one.group.group.max_tokens > start]
            for group_id, names in groupby(running, key=lambda name: name.rpartition("#")[0]):
                for name in names:
                    if self._watch_s and start + CHUNK_TOKENS >= longest:
                        self._begin_watch()
                    await asyncio.sleep(0)
                    self._continue(batch, name, start)
                if all(sample.end is not None for sample in batch.groups[group_id].samples):
                    batch.hand_out(batch.emit(group_id), self._prompts)

    def _begin_watch(self) -> None:
        self._tasks.add(asyncio.ensure_future(self._loop.watch(self._watch_s)))
        self._watch_s = 0.0

    def _continue(self, batch: LiveBatch, name: str, start: int) -> None:
        sample = batch.samples[name]
        left = sample.group.group.max_tokens - start
        part = self._part(min(CHUNK_TOKENS, left))
        self._ended_s = time.time()
        sample.append(start, part, "replica")
        if left <= CHUNK_TOKENS:
            batch.end(EndSample(name, SampleEnd.STOP, None, "bench"), time.monotonic())

    def _part(self, tokens: int) -> ChunkResult:
        logprobs = -self._chance.random(tokens, np.float32)
        return ChunkResult(
            chunk_id="chunk",
            token_ids=self._chance.integers(0, VOCABULARY, tokens, np.int32),
            logprobs=logprobs,
            raw_logprobs=logprobs * 2,
            end=ChunkEnd.LENGTH,
            weights_version=0,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            cached_tokens=0,
            computed_tokens=0,
        )
