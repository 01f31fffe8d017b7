"""The live shell of `RolloutCore`: what happens becomes events, the core decides, its actions are performed.

One turn of the loop reads observe, decide, act. This class holds the batches and the chunks that run; it decides
nothing. Invariant: a chunk's tokens are written only while the core says that the chunk runs, so a late answer of a
lost replica changes nothing. Driven by the coordinator deployment.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from tailrace.deployments.context.service import ContextService
from tailrace.deployments.coordinator.chunk_runner import ChunkRunner
from tailrace.deployments.coordinator.core_holder import CoreHolder
from tailrace.deployments.coordinator.engine_client import EngineClient
from tailrace.deployments.coordinator.kv_pool_manager import KvPoolManager
from tailrace.deployments.coordinator.live_batch import LiveBatch
from tailrace.deployments.coordinator.prompts import Prompts
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.replica_target import ReplicaTarget
from tailrace.deployments.coordinator.status import replica_statuses, waits_for
from tailrace.deployments.coordinator.weights import Weights
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.rollout import GroupResult, Rejected, RolloutBatch, WeightsLoaded
from tailrace.deployments.messages.status import ServiceStatus
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.ordering import OracleLongestFirst
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import (
    AbortChunk,
    EmitGroup,
    EndSample,
    Prefetch,
    ReleaseKv,
    SampleEnd,
    SetReplicas,
    StartChunk,
)
from tailrace.policies.protocol.events import IllegalEvent

TICK_S = 0.5
"""A turn comes at once when something has happened; this only bounds how long a missed wake-up could hide."""

POLL_S = 0.5
"""How often replicas and pool are asked: enough for a progress bar, and a lost idle replica shows in 3 s."""


class Rollouts:
    """See the module docstring. `run` and `poll` are to be started once, as tasks of the same loop."""

    def __init__(
        self,
        engines: EngineClient,
        prompts: Prompts,
        policies: Policies,
        telemetry: Telemetry,
        pool_manager: KvPoolManager | None,
        context: ContextService | None,
    ):
        self._engines, self._prompts, self._telemetry = engines, prompts, telemetry
        self._pool_manager, self._context = pool_manager, context
        self._chunk_runner = ChunkRunner(engines, telemetry, self.now)
        self._weights = Weights(engines)
        self.core_holder = CoreHolder(policies)
        self.replica_target = ReplicaTarget()
        self._registry = ReplicaRegistry()
        self._inbox: list[tuple[ev.Event, Callable[[], None] | None]] = []  # what happened, and how to write it down
        self._wake = asyncio.Event()
        self._batches: dict[str, LiveBatch] = {}
        self._home: dict[str, LiveBatch] = {}  # id of a sample, until it has ended, or of a group -> its batch
        self._tasks: set[asyncio.Task] = set()
        self._began_s = time.monotonic()

    def now(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._began_s

    @property
    def _core(self) -> RolloutCore:
        return self.core_holder.present

    # ---- what drivers call -------------------------------------------------------------------------

    async def rollout(self, message: RolloutBatch) -> AsyncIterator[GroupResult | Rejected]:
        """Each group as it finishes; or one `Rejected`. A driver that goes away cancels its batch."""
        batch = await self._submit(message)
        if isinstance(batch, Rejected):
            yield batch
            return
        try:
            for _ in range(len(batch.groups)):
                yield await batch.ready.get()
        finally:
            if not batch.over:
                self._tell(ev.BatchCancelled(self.now(), message.batch_id))

    async def cancel(self, batch_id: str) -> bool:
        """End a batch: its groups come out at once, unfinished samples marked cancelled. False: no such batch."""
        if batch_id not in self._batches:
            return False
        self._tell(ev.BatchCancelled(self.now(), batch_id))
        return True

    def reserve(self, replicas: int) -> None:
        """At least so many are wanted until the next batch has come."""
        self._tell(ev.ReplicasReserved(self.now(), replicas))

    async def update_weights(self, version: int, source: str) -> WeightsLoaded | Rejected:
        """Every replica loads the folder `source` in place, between chunks; samples in flight continue under `version`.

        Returns when all replicas hold it, or with the reason why they do not; see `Weights`.
        """
        if (refusal := await self._weights.want(version, source)) is not None:
            return refusal
        self._follow_weights(list(self._registry.reports.values()))
        return await self._weights.loaded()

    def status(self) -> ServiceStatus:
        counts = self._core.counts()
        streamed = {
            c: n for c, n in self._registry.streamed().items() if self._core.is_running(c) and not self._core.is_copy(c)
        }
        return ServiceStatus(
            waiting=counts["waiting"],
            running=counts["running"],
            batches=tuple(batch.status(self.now(), streamed) for batch in self._batches.values()),
            replicas=replica_statuses(self._core.replicas, self._registry.reports),
            observed_s=self.now() - min(self._registry.observed_at.values(), default=self.now()),
            waits_for=waits_for(self._core.replicas, bool(self._batches), self._weights.problem),
            policies=self._core.policies.model_dump(),
            weights_version=self._weights.version,
            pool=self._pool_manager.view() if self._pool_manager else None,
            context=self._context.counts() if self._context else None,
        )

    async def take_spans(self, trace_id: str) -> list[dict]:
        """The spans of a trace that was to be kept, from here and from every replica."""
        return self._telemetry.take(trace_id) + await self._engines.take_spans(trace_id)

    async def reset_caches(self) -> None:
        """Every replica forgets the KV of chunks that have ended: a benchmark's runs must not help each other."""
        await self._engines.reset_caches()

    # ---- the loops ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Observe, decide, act, for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            self._exchange_core()
            self._observe()
            self._act(self._core.decide(ev.Tick(self.now())))

    async def poll(self) -> None:
        """Ask the replicas what they run, for ever."""
        while True:
            asked_at = self.now()
            reports = await self._engines.stats()
            self._follow_weights(reports)
            for event in self._registry.observe(reports, asked_at, self.now()):
                self._tell(event)
            self.replica_target.see(len(self._registry.joined))
            await asyncio.sleep(POLL_S)

    async def poll_pool(self) -> None:
        """Hear what the pool has to say, and sweep it while nothing is in flight, for ever."""
        while True:
            self._pool_manager.learn(self._registry.reports.values())
            for event in await self._pool_manager.poll(self.now()):
                self._tell(event)
            self._pool_manager.rest(idle=not self._batches)
            await asyncio.sleep(POLL_S)

    def _follow_weights(self, reports: list[EngineStats]) -> None:
        """Start the loads that are due, and tell the core of a new version."""
        list(map(self._spawn, self._weights.observe(reports)))
        old, new = self._core.replicas.weights_version, self._weights.version
        if new > old:
            self._tell(ev.WeightsChanged(self.now(), new))
            if self._pool_manager is not None and self._core.policies.kv_on_update.kv_version(old, new) == new:
                self._pool_manager.retire(old)

    def _tell(self, event: ev.Event, write: Callable[[], None] | None = None) -> None:
        self._inbox.append((event, write))
        self._wake.set()

    def _observe(self) -> None:
        inbox, self._inbox = self._inbox, []
        for event, write in inbox:
            if self._is_late(event):
                continue
            counts = not isinstance(event, ev.ChunkFinished) or self._core.counts_tokens(event)
            self._core.observe(event)
            if write is not None and counts:  # else another chunk has made, or will make, the same tokens
                write()

    def _is_late(self, event: ev.Event) -> bool:
        """Whether what an event speaks of is over already: a lost replica's chunk, an emitted batch."""
        match event:
            case ev.ChunkFinished() | ev.ChunkFailed() | ev.TokensStreamed():
                return not self._core.is_running(event.chunk_id)
            case ev.ReplicaLeft() | ev.ReplicaMeasured():
                return event.replica_id not in self._core.replicas
            case ev.BatchCancelled():
                return event.batch_id not in self._batches
        return False

    def _act(self, actions: tuple) -> None:
        for action in actions:
            match action:
                case StartChunk():
                    self._spawn(self._run_chunk(action, self._home[action.sample_id]))
                case AbortChunk():
                    self._spawn(self._chunk_runner.abort(action))
                case SetReplicas():
                    self.replica_target.want(action)
                case EndSample():
                    self._end(action)
                case EmitGroup():
                    self._emit(action)
                case ReleaseKv() if self._pool_manager is not None:
                    self._pool_manager.release(self._home[action.group_id], action)
                case Prefetch() if self._pool_manager is not None:
                    if report := self._registry.reports.get(action.replica_id):  # else lost since
                        self._pool_manager.prefetch(self._home[action.sample_id], action.sample_id, report.node_id)

    def _spawn(self, coroutine) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- batches -----------------------------------------------------------------------------------

    async def _submit(self, message: RolloutBatch) -> LiveBatch | Rejected:
        prepared = await asyncio.to_thread(self._prompts.prepare, message)
        if isinstance(prepared, Rejected):
            return prepared
        if message.batch_id in self._batches:
            return Rejected(reason=f"batch_id {message.batch_id!r} is running already; give another")
        keys = [one.prompt_key for one in prepared]
        past = await self._context.lengths(keys) if self._context is not None else {}
        batch = LiveBatch(message, prepared, past, self.now())
        self._exchange_core()
        try:
            if isinstance(self._core.policies.ordering, OracleLongestFirst):
                self._core.observe(ev.LengthsRevealed(self.now(), batch.true_lengths()))
            self._core.observe(ev.SamplesSubmitted(self.now(), message.batch_id, batch.specs))
        except IllegalEvent as error:
            return Rejected(reason=str(error))
        batch.open_spans(self._telemetry)
        self._batches[message.batch_id] = batch
        self._home.update(dict.fromkeys([*batch.samples, *batch.groups], batch))
        self._wake.set()
        return batch

    def _end(self, action: EndSample) -> None:
        batch = self._home.pop(action.sample_id)
        sample = batch.samples[action.sample_id]
        sample.end, sample.error = action.end, action.error
        sample.finished_s = self.now() - batch.submitted_s
        batch.ended += 1
        if self._context is not None and action.end in (SampleEnd.STOP, SampleEnd.LENGTH):
            self._context.finish(sample.group.ref, batch.message.step, [sample.answer()])

    def _emit(self, action: EmitGroup) -> None:
        batch = self._home.pop(action.group_id)
        batch.ready.put_nowait(batch.groups[action.group_id].result(self._prompts))
        batch.group_spans[action.group_id].end()
        if self._context is not None:
            self._context.end(batch.groups[action.group_id].ref)
        batch.emitted += 1
        if batch.over:
            batch.span.end()
            del self._batches[action.batch_id]

    def _exchange_core(self) -> None:
        if not self._batches:
            self.core_holder.exchange(self._registry.joined.values())

    # ---- chunks ------------------------------------------------------------------------------------

    async def _run_chunk(self, start: StartChunk, batch: LiveBatch) -> None:
        event, write = await self._chunk_runner.run(start, batch, self._core.policies.drafting)
        if isinstance(event, ev.ReplicaLeft):
            self._registry.lose(start.replica_id, self.now())
        self._tell(event, write)
