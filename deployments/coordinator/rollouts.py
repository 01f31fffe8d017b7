"""The coordinator's main object: turns reports into events, asks `RolloutCore` to decide, and performs its actions.

One turn of the loop reads observe, decide, act. This class holds the batches and the chunks that run; it decides
nothing. Invariant: a chunk's tokens are written only while the core says that the chunk runs, so a late answer of a
lost replica changes nothing. Driven by the coordinator deployment.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from math import inf
from typing import Any

from tailrace.deployments.batches.deliveries import Deliveries, Delivery
from tailrace.deployments.batches.live_batches import LiveBatches
from tailrace.deployments.batches.open_sessions import OpenSessions
from tailrace.deployments.batches.prompts import Prompts
from tailrace.deployments.batches.records import GroupRecord
from tailrace.deployments.batches.token_log import TokenLog, unlogged
from tailrace.deployments.batches.trajectories import Trajectories
from tailrace.deployments.context.service import ContextService
from tailrace.deployments.coordinator.adapter_loads import AdapterLoads
from tailrace.deployments.coordinator.admission import Admission
from tailrace.deployments.coordinator.chunk_runner import ChunkRunner
from tailrace.deployments.coordinator.core_holder import CoreHolder
from tailrace.deployments.coordinator.engine_client import EngineClient
from tailrace.deployments.coordinator.kv_pool_manager import KvPoolManager
from tailrace.deployments.coordinator.loop import Loop, MadeTokens
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.replica_target import ReplicaTarget
from tailrace.deployments.coordinator.sleep import Sleep
from tailrace.deployments.coordinator.snapshot_parts import replica_statuses, sample_statuses, waits_for
from tailrace.deployments.coordinator.weight_transfer import WeightTransfer
from tailrace.deployments.coordinator.weights import Weights
from tailrace.deployments.coordinator.weights_check import weights_check
from tailrace.deployments.feed.acceptance import Acceptance
from tailrace.deployments.feed.feed import Feed
from tailrace.deployments.feed.logs import Logs
from tailrace.deployments.feed.looks import Looks
from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.feed.trails import Trails
from tailrace.deployments.messages.adapters import Adapter
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.command import Peek, ResetCache, TakeSpans
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import (
    GroupResult,
    Rejected,
    RolloutBatch,
    WeightsCheck,
    WeightsLoaded,
)
from tailrace.deployments.messages.status import SampleDetail, ServiceSnapshot
from tailrace.deployments.metrics.collector import ServiceCollector
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.ordering import OracleLongestFirst
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import (
    AbortChunk,
    EmitGroup,
    EndSample,
    EndTurn,
    Prefetch,
    ReleaseKv,
    SetReplicas,
    StartChunk,
)
from tailrace.policies.protocol.events import IllegalEvent

TICK_S = 0.5
"""Maximum seconds between turns. A turn comes at once when an event arrives; this bounds the effect of a missed
wake-up.
"""

POLL_S = 1.0
"""Seconds between polls of the pool, and so the maximum age of its fullness and of a loss. A poll costs 5 ms of a
core.
"""

PEEK_S = 1.0
"""Maximum seconds to wait for the tokens of a running chunk."""

LOOKS_PER_S = 20
"""Maximum number of times a second that the replicas' reports are read, however many change."""

LOOK_REPORTS = 32
"""Number of new reports that one look should find: each report of 64 chunks takes the loop 0.1 ms."""


class Rollouts:
    """See the module docstring. Start `run` and `look` once, as tasks of the same loop."""

    def __init__(
        self,
        engines: EngineClient,
        prompts: Prompts,
        policies: Policies,
        telemetry: Telemetry,
        kv_pool_manager: KvPoolManager | None,
        context: ContextService | None,
        token_log: TokenLog,
        nonce: str,
    ):
        """`nonce`: unique among all coordinators, past and present, of this application."""
        loop = self._loop = Loop(engines.changed)
        self._engines, self._prompts, self._telemetry, self._context = engines, prompts, telemetry, context
        self._kv_pool_manager, self._token_log = kv_pool_manager, token_log
        self.core_holder, self.replica_target, self._registry = CoreHolder(policies), ReplicaTarget(), ReplicaRegistry()
        self._weights = Weights(engines, before=self._log_early)
        self.adapters = AdapterLoads(engines, prompts.model)
        self.weight_transfer = WeightTransfer(
            engines, lambda: self._registry.reports, lambda: (self._weights.version, self._weights.digest)
        )
        self.totals, self._acceptance, self._trails = EndTotals(), Acceptance(), Trails(loop.now)
        self._runner = ChunkRunner(
            loop=loop,
            engines=engines,
            registry=self._registry,
            digests=self._weights.digests,
            totals=self.totals,
            acceptance=self._acceptance,
        )
        self._batches = LiveBatches(
            prompts=prompts,
            context=context,
            telemetry=telemetry,
            token_log=token_log,
            weights=self._weights,
            adapters=self.adapters.book,
            nonce=nonce,
            now=loop.now,
        )
        self.admission = Admission(
            loop=loop,
            core_holder=self.core_holder,
            registry=self._registry,
            weights=self._weights,
            batches=self._batches,
            runner=self._runner,
            cancel_all=self.cancel_all,
        )
        self.sleep = Sleep(loop, engines, self._registry, self._weights, self.admission)
        self.deliveries = Deliveries(self._submit, self._cancel, self.admission.refusal, loop.now)
        self.sessions = OpenSessions(
            prompts=prompts,
            context=context,
            batches=self._batches,
            adapters=self.adapters.book,
            admission=self.admission,
            loop=loop,
            quota=self.deliveries.quota_refusal,
            observe=self._observe_now,
        )
        self.deliveries.session_loads = self.sessions.loads
        self.trajectories = Trajectories(nonce, loop.now, self.sessions.cancel)
        self._heard = False  # True once a replica has reported
        self._contained: Counter[str] = Counter()  # contained errors, by place and kind
        self._unix_s = time.time() - loop.now()  # unix seconds at the clock's 0
        self.logs = Logs(self._batches, self._trails, core=lambda: self._core, now=loop.now, unix_s=self._unix_s)
        self.metrics = ServiceCollector(self.totals, self.status)
        keys = None if kv_pool_manager is None else kv_pool_manager.keys_by_version
        self.feed = Feed(Looks(self.status), nonce, keys, lambda error: self._note("feed", error))

    def now(self) -> float:
        """Seconds since this object was created."""
        return self._loop.now()

    @property
    def _core(self) -> RolloutCore:
        return self.core_holder.present

    # ---- called by drivers -------------------------------------------------------------------------

    def rollout(
        self, message: RolloutBatch, driver: str = "", have: Collection[str] = ()
    ) -> AsyncIterator[GroupResult | Rejected]:
        """Yields each group as it finishes, except for the prompt ids in `have`; or one `Rejected`, as the last item.

        `driver`: the client's name. Closing the stream cancels its batch. A stream that was lost may be opened again
        for its missing groups, see `Delivery`.
        """
        return self.deliveries.read(message, driver, have)

    def _cancel(self, delivery: Delivery) -> bool:
        """Cancels a batch's samples in the core. Returns False if it has none."""
        if delivery.is_over and not delivery.was_refused and self._token_log.is_on:
            self._loop.spawn(self._token_log.forget(delivery.batch_id))
        core_ids = self._batches.core_ids(delivery)
        for core_id in core_ids:
            self._loop.tell(ev.BatchCancelled(self._loop.now(), core_id))
        return bool(core_ids)

    def cancel_all(self) -> int:
        """Ends every sample in flight with its tokens so far. Returns their number."""
        in_flight = self.core_holder.in_flight()
        for session in self.sessions.loads():
            self.sessions.cancel(session, None, None)
        self.deliveries.cancel_all()
        return in_flight

    def reserve(self, replicas: int) -> None:
        """Reserves `replicas` or more until the next batch arrives. Raises ValueError unless that is an integer >=
        0.
        """
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            raise ValueError(f"replicas is {replicas!r}; give an integer, 0 or more")
        self._loop.tell(ev.ReplicasReserved(self._loop.now(), replicas))

    async def update_weights(self, version: int, source: str, digest: str = "") -> WeightsLoaded | Rejected:
        """Has every replica load the folder `source` in place, between chunks. Samples in flight continue under
        `version`.

        Returns when all replicas hold it, or with the reason why they do not; see `Weights`.
        """
        await self._loop.looked.wait()
        if (refusal := await self._weights.want(version, source, digest)) is not None:
            return refusal
        self.sleep.wake_weights()
        self._follow_weights()
        return await self._weights.loaded()

    async def load_adapter(self, name: str, path: str) -> Adapter | Rejected:
        """Has every replica load an adapter's folder, then binds `name` to its content; see `AdapterLoads`."""
        await self._loop.looked.wait()
        return await self.adapters.load(name, path)

    def status(self, survey: Survey | None = None) -> ServiceSnapshot:
        """Returns a snapshot of the service, the only one that status, boards, metrics and `top` read.

        `survey`: reads its next part of the samples; None: all samples are read, and no longest ones are given.
        """
        core, now_s, pool = self._core, self._loop.now(), self._kv_pool_manager
        counts, weights, target = core.counts(), self._weights, self.replica_target
        survey = Survey(count=0, part=None) if survey is None else survey
        survey.look(core)
        return ServiceSnapshot(
            coordinator_s=now_s,
            waiting=counts["waiting"],
            running=counts["running"],
            held=counts["held"],
            queued=core.queued(),
            waiting_for=survey.waiting,
            longest=sample_statuses(core, survey.longest(), self._trails),
            batches=self._batches.statuses(self._unix_s, survey.tokens),
            replicas=replica_statuses(core, self._registry, now_s),
            wanted=target.wanted,
            wanted_why=target.reason,
            observed_s=now_s - min(self._registry.observed_at.values(), default=now_s),
            waits_for=waits_for(core.replicas, bool(self._batches), weights.problem, self.admission.held),
            policies=core.policies.model_dump(),
            weights_version=weights.version,
            weights_digest=weights.digest,
            weights_source=weights.source,
            weights_problem=weights.problem or "",
            pool=None if pool is None else pool.view(),
            context=self._context.counts() if self._context else None,
            held_bytes=self.deliveries.held_bytes(),
            at_admission=self.admission.waiting,
            model=self._prompts.model,
            max_model_len=self._prompts.max_model_len,
            exactness=self.core_holder.exactness,
            paused=self.admission.is_paused,
            asleep=self.sleep.tags,
            adapters=self.adapters.book.all(),
            contained=self._contained + self._token_log.problems,
            acceptance=self._acceptance.row(),
            faults=self.logs.faults(),
        )

    def count_by(self, totals: EndTotals) -> None:
        """Replaces the object that counts ends; for a benchmark that compares two."""
        self.totals = self._runner.totals = totals

    async def sample_detail(self, sample_id: str) -> SampleDetail | None:
        """Returns one sample's state, with the tokens of its running chunk if the replica sends them within PEEK_S."""
        chunk, more = self._trails.running(sample_id), None
        if chunk is not None:
            with contextlib.suppress(Exception):  # the replica may be lost, or in a long step: it is only for people
                more = await asyncio.wait_for(self._engines.ask(chunk.replica_id, Peek(chunk.chunk_id)), PEEK_S)
        is_last = chunk is not None and self._trails.running(sample_id) is chunk
        return self._batches.detail(sample_id, more if is_last else None)

    def books(self) -> dict[str, int]:
        """Returns the number of entries in each book that must be empty when nothing is in flight."""
        here = {
            "at_admission": len(self.admission.waiting),
            "deliveries": len(self.deliveries),
            "sessions": len(self.sessions),
            "trajectories": len(self.trajectories),
            "events": len(self._loop),
            "tasks": len(self._loop.tasks) + self.deliveries.submitting + self.sessions.submitting,
            "trails": self._trails.unended,
        }
        return self._core.counts() | self._batches.counts() | here

    async def take_spans(self, trace_id: str) -> list[dict]:
        """The spans of a trace that was to be kept, from here and from every replica."""
        answers: list[Any] = []
        with contextlib.suppress(TimeoutError):
            answers = await self._engines.ask_all(TakeSpans(trace_id))
        of_replicas = [span for answer in answers if isinstance(answer, list) for span in answer]
        return self._telemetry.take(trace_id) + of_replicas

    async def read_weights(self) -> WeightsCheck | Rejected:
        """Reads back the weights that every replica computes with, and compares them. Returns Rejected if one cannot be
        read.
        """
        return await weights_check(self._engines, sorted(self._registry.reports))

    async def reset_caches(self) -> bool:
        """Has every replica drop the KV of chunks that have ended, so that a benchmark's runs do not help each other.

        Returns False if one keeps it, because chunks run there.
        """
        return all(answer is True for answer in await self._engines.ask_all(ResetCache()))

    # ---- the loops ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs the loop: observe, log tokens that cannot be made again, decide, act. Never returns."""
        while True:
            await self._loop.woken(TICK_S)
            try:
                self.admission.exchange_core()
                self._observe()
                await self._log_tokens()
                self._act(self._core.decide(ev.Tick(self._loop.now())))
            except Exception as error:  # noqa: BLE001 - a policy's error, or a defect: the core may be half updated
                self._restart_core("turn", error)
            self._loop.turn_ends()

    async def look(self) -> None:
        """Reads the replicas' reports again and again. Reads at once if one has changed, since that replica may wait
        for work.
        """
        while True:
            await self._contain("look_at_replicas", self._look_at_replicas)
            await asyncio.sleep(1 / LOOKS_PER_S)
            await self._loop.reported(self._look_s())

    def _look_s(self) -> float:
        """Returns the seconds to the next look, if no replica reports a change."""
        return self._engines.report_s * min(1.0, LOOK_REPORTS / max(1, len(self._registry.joined)))

    async def poll_pool(self) -> None:
        """Polls the pool, and sweeps it while nothing is in flight. Never returns."""
        while True:
            await self._contain("poll_pool", self._poll_pool)
            await asyncio.sleep(POLL_S)

    async def _contain(self, place: str, work: Callable[[], Awaitable]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - an ill-formed report or a pool error must not end the service
            self._note(place, error)

    async def _look_at_replicas(self) -> None:
        if not self._engines.settled:
            return
        heard = self._engines.heard()
        reports = [one.report for one in heard]
        self._weights.observe(reports)
        calls = self.adapters.observe(reports)
        for call in calls + self.sleep.look(reports, first=bool(reports) and not self._heard):
            self._loop.spawn(call)
        self._heard = self._heard or bool(reports)
        self._loop.looked.set()
        self._follow_weights()
        known = [(self._weights.known(report), observed_s - self._loop.began_s) for report, observed_s in heard]
        for event in self._registry.observe(known, self._loop.now()):
            self._loop.tell(event)
        self.replica_target.see(len(self._registry.joined))
        self._runner.watch.look(reports)
        self._abort_orphans(self._registry.renewed)
        self._loop.look_ends()
        if gone := self.deliveries.expire() + self.sessions.sweep(hasty=self.core_holder.due):
            self._contained["drivers.silent"] += gone
        self.trajectories.sweep()

    def _abort_orphans(self, reports: list[EngineStats]) -> None:
        """Stops chunks that have no caller: an earlier coordinator started them, or their call was lost. Also stops
        those that the core no longer runs there, because their replica was silent for too long.
        """
        calls, core = self._runner.calls, self._core
        for report in reports:
            uncalled = (chunk_id for chunk_id in report.running if chunk_id not in calls)
            for chunk_id in dict.fromkeys((*core.ended(report.running), *uncalled)):
                abort = AbortChunk(chunk_id, report.replica_id, False, "its caller is gone")
                self._runner.abort(abort)

    async def _poll_pool(self) -> None:
        self._kv_pool_manager.learn(self._registry.reports.values())
        for event in await self._kv_pool_manager.poll(self._loop.now()):
            self._loop.tell(event)
        self._kv_pool_manager.rest(idle=not self._batches)

    def _note(self, place: str, error: Exception) -> None:
        """Counts a contained error, and logs it."""
        self._contained[f"{place}.{type(error).__name__}"] += 1
        logging.getLogger(__name__).error("contained in %s: %s", place, one_line(error), exc_info=error)

    def _follow_weights(self) -> None:
        """Starts the loads that are due, and gives the core a new version once all older tokens are logged."""
        if not self._token_log.is_complete(self._weights.version):
            self._loop.wake()  # the next turn logs and calls this again
            return
        for load in self._weights.loads(asyncio.get_running_loop().time()):
            self._loop.spawn(load).add_done_callback(lambda _: self._loop.look_soon())
        old, new = self._core.replicas.weights_version, self._weights.version
        if new > old and self._weights.is_confirmed:
            self._loop.tell(ev.WeightsChanged(self._loop.now(), new))
            if self._kv_pool_manager is not None and self._core.policies.kv_on_update.kv_version(old, new) == new:
                self._kv_pool_manager.retire(old)

    async def _log_tokens(self) -> None:
        """Logs the tokens of earlier weights, if there are new ones or the weights are about to change."""
        version = self._weights.version
        if not self._token_log.is_complete(version):
            await self._token_log.write(unlogged(self.groups(), version), version)
            self._follow_weights()

    async def _log_early(self) -> None:
        """Logs all tokens so far while turns continue: their weights may change soon."""
        if self._token_log.is_on:
            await self._token_log.write_early(unlogged(self.groups(), inf))

    @property
    def is_idle(self) -> bool:
        """True while nothing is in flight."""
        return not self._batches

    def groups(self) -> list[GroupRecord]:
        """Returns all groups that their drivers have not received yet."""
        return [*self._batches.groups(), *self.deliveries.unread()]

    def _observe(self) -> None:
        for event, made in self._loop.take():
            if self._is_late(event):
                continue
            if isinstance(event, ev.ReplicaLeft) and not self._core.replicas.is_closing(event.replica_id):
                self.totals.faults["replica_lost"] += 1
            counts = not isinstance(event, ev.ChunkFinished) or self._core.counts_tokens(event)
            try:
                self._core.observe(event)
            except IllegalEvent as error:  # an illegal event does not change the core
                self._note(type(event).__name__, error)
                if isinstance(event, ev.ChunkFinished):
                    failed = ev.ChunkFailed(event.now, event.chunk_id, one_line(error))
                    self._core.observe(failed)
                    self._trails.observe(failed)
                continue
            self._trails.observe(event)
            if made is not None and counts:  # else another chunk makes the same tokens
                self._write(made)

    def _write(self, made: MadeTokens) -> None:
        """Appends the tokens of a chunk to its sample, and counts them."""
        moved = made.write()
        made.batch.progress_s = self._loop.now()
        self.totals.wrote(made.result, moved)
        if made.result.weights_version < self._weights.version:
            self._token_log.reopen()

    def _is_late(self, event: ev.Event) -> bool:
        """Returns whether the subject of an event has already ended: a lost replica's chunk, an emitted batch."""
        match event:
            case ev.ChunkFinished() | ev.ChunkFailed():
                return not self._core.is_running(event.chunk_id)
            case ev.ReplicaLeft() | ev.ReplicaMeasured():
                return event.replica_id not in self._core.replicas
            case ev.BatchCancelled():
                return not self._core.knows_batch(event.batch_id)
            case ev.SampleCancelled():
                return not self._core.knows_sample(event.sample_id)
        return False

    def _act(self, actions: tuple) -> None:
        for action in actions:
            self._trails.act(action)
            match action:
                case StartChunk():
                    self._runner.start(action, self._batches.of(action.sample_id), self._core.policies.drafting)
                case AbortChunk():
                    self._runner.abort(action)
                case SetReplicas():
                    self.replica_target.want(action)
                case EndTurn():
                    self._batches.end_turn(action)
                case EndSample():
                    self._batches.end(action)
                    self.totals.sample_ended(action.end)
                case EmitGroup():
                    if (over := self._batches.emit(action)) is not None:
                        self.totals.batch_over(over.parts_s(self._loop.now()))
                case ReleaseKv() | Prefetch() if self._kv_pool_manager is not None:
                    self._act_on_pool(action)

    def _act_on_pool(self, action: ReleaseKv | Prefetch) -> None:
        try:
            if isinstance(action, ReleaseKv):
                self._kv_pool_manager.release(self._batches.of(action.group_id), action)
            elif report := self._registry.reports.get(action.replica_id):  # else lost since
                batch = self._batches.of(action.sample_id)
                self._kv_pool_manager.prefetch(batch, action.sample_id, report.node_id)
        except Exception as error:  # noqa: BLE001 - the pool is a cache, never a dependency
            self._note("pool", error)

    # ---- batches -----------------------------------------------------------------------------------

    async def _submit(self, message: RolloutBatch, delivery: Delivery) -> Rejected | None:
        """Submits groups to the core. Returns Rejected if it refuses them, else None."""
        batch = await self._batches.prepare(message, delivery)
        if isinstance(batch, Rejected):
            return batch
        await self.admission.admitted(message.batch_id, lambda: bool(self._batches.core_ids(delivery)))
        events = [batch.submission(self._loop.now())]
        self.admission.exchange_core()
        if isinstance(self._core.policies.ordering, OracleLongestFirst):
            events.insert(0, ev.LengthsRevealed(self._loop.now(), batch.true_lengths()))
        if (refused := self._observe_now(*events)) is not None:
            return refused
        self._batches.add(batch)
        if any(spec.begun for spec in batch.specs):  # this coordinator now owns the token log's file
            self._loop.spawn(self._log_early())
        if delivery.is_over:  # its driver has left meanwhile
            self._loop.tell(ev.BatchCancelled(self._loop.now(), batch.core_id))
        return None

    def _observe_now(self, *events: ev.Event) -> Rejected | None:
        """Gives the core events of batches between two turns. Returns Rejected if it refuses one, else None."""
        self.admission.exchange_core()
        self._loop.wake()
        try:
            for event in events:
                self._core.observe(event)
        except IllegalEvent as error:
            return Rejected(reason=str(error))
        except Exception as error:  # noqa: BLE001 - a policy's error: the core's state may be half updated
            self._restart_core("submit", error)
            return Rejected(reason=f"the batch was ended by an error: {one_line(error)}")
        return None

    def _restart_core(self, place: str, error: Exception) -> None:
        """Ends every batch with a reason and starts a new core: the state of this one is unknown."""
        self._note(place, error)
        self._batches.fail(one_line(error))
        self._trails.forget_live()
        for call in self._runner.calls.values():
            call.cancel()
        self.core_holder.restart(self._registry.joined.values())
