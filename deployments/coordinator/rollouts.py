"""The coordinator's main object: turns reports into events, asks `RolloutCore` to decide, and performs its actions.

One turn of the loop reads observe, decide, act; this class decides nothing. Invariant: a chunk's tokens are written
only while the core says that the chunk runs, so a late answer of a lost replica changes nothing.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf

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
from tailrace.deployments.coordinator.chunk_watch import orphans
from tailrace.deployments.coordinator.core_holder import CoreHolder
from tailrace.deployments.coordinator.engine_client import EngineClient
from tailrace.deployments.coordinator.kv_pool_manager import KvPoolManager
from tailrace.deployments.coordinator.loop import Loop, MadeTokens
from tailrace.deployments.coordinator.publications import Publications
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.coordinator.replica_target import ReplicaTarget
from tailrace.deployments.coordinator.sleep import Sleep
from tailrace.deployments.coordinator.snapshot import book_sizes, service_snapshot
from tailrace.deployments.coordinator.weight_transfer import WeightTransfer
from tailrace.deployments.coordinator.weights import Weights
from tailrace.deployments.coordinator.withdrawn_weights import refuse_waiting
from tailrace.deployments.feed.acceptance import Acceptance
from tailrace.deployments.feed.feed import Feed
from tailrace.deployments.feed.logs import Logs
from tailrace.deployments.feed.looks import Looks
from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.feed.trails import Trails
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.rollout import Rejected, RolloutBatch, WeightsLoaded
from tailrace.deployments.messages.status import ServiceSnapshot
from tailrace.deployments.metrics.collector import ServiceCollector
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.families.kv_on_update import drops_kv
from tailrace.policies.families.ordering import OracleLongestFirst
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import actions as ac
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.events import IllegalEvent

TICK_S = 0.5
"""Maximum seconds between turns; an event starts one at once. It bounds the effect of a missed wake-up."""

POLL_S = 1.0
"""Seconds between polls of the pool: the maximum age of its fullness and of a loss. A poll takes 5 ms of a core."""

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
        loop = self.loop = Loop(engines.changed)
        self._engines, self.prompts, self._telemetry, self.context = engines, prompts, telemetry, context
        self.kv_pool_manager, self.token_log = kv_pool_manager, token_log
        self.core_holder = CoreHolder(policies, loop.now)
        self.replica_target, self.registry = ReplicaTarget(), ReplicaRegistry()
        self.weights = Weights(engines, self._log_early, lambda: self.core_holder.exactness, self.core_holder.keeps)
        self.adapters = AdapterLoads(engines, prompts.model, loop.looked.wait)
        self.weight_transfer = WeightTransfer(
            engines, lambda: self.registry.reports, lambda: (self.weights.version, self.weights.digest)
        )
        self.publications = Publications(
            lambda: self.weights.version, self.update_weights, loop.spawn, loop.looked.wait
        )
        self.totals, self.acceptance, self.trails = EndTotals(), Acceptance(), Trails(loop.now)
        self._runner = ChunkRunner(
            loop=loop,
            engines=engines,
            registry=self.registry,
            digests=self.weights.digests,
            totals=self.totals,
            acceptance=self.acceptance,
        )
        self.batches = LiveBatches(
            prompts=prompts,
            context=context,
            telemetry=telemetry,
            token_log=token_log,
            weights=self.weights,
            adapters=self.adapters.book,
            nonce=nonce,
            now=loop.now,
        )
        self.admission = Admission(
            loop=loop,
            core_holder=self.core_holder,
            registry=self.registry,
            weights=self.weights,
            batches=self.batches,
            runner=self._runner,
            cancel_all=self.cancel_all,
        )
        self.sleep = Sleep(loop, engines, self.registry, self.weights, self.admission)
        self.deliveries = Deliveries(self._submit, self._cancel, self.admission.refusal, loop.now)
        self.sessions = OpenSessions(
            prompts=prompts,
            context=context,
            batches=self.batches,
            adapters=self.adapters.book,
            admission=self.admission,
            loop=loop,
            quota=self.deliveries.quota_refusal,
            observe=self._observe_now,
        )
        self.deliveries.session_loads = self.sessions.loads
        self.trajectories = Trajectories(nonce, loop.now, self.sessions, context and context.reward)
        self._reported = False  # True once a replica has reported
        self.contained: Counter[str] = Counter()  # contained errors, by place and kind
        self.unix_s = time.time() - loop.now()  # unix seconds at the clock's 0
        self.logs = Logs(self.batches, self.trails, lambda: self.core, loop.now, unix_s=self.unix_s, peek=engines.peek)
        self.metrics = ServiceCollector(self.totals, self.status)
        keys = None if kv_pool_manager is None else kv_pool_manager.keys_by_version
        self.feed = Feed(Looks(self.status), nonce, keys, lambda error: self._note("feed", error))

    @property
    def core(self) -> RolloutCore:
        return self.core_holder.present

    # ---- called by drivers -------------------------------------------------------------------------

    def _cancel(self, delivery: Delivery) -> None:
        """Cancels a batch's samples in the core."""
        if delivery.is_over and not delivery.was_refused and self.token_log.is_on:
            self.loop.spawn(self.token_log.forget(delivery.batch_id))
        for core_id in self.batches.core_ids(delivery):
            self.loop.tell(ev.BatchCancelled(self.loop.now(), core_id))

    def cancel_all(self) -> int:
        """Ends every sample in flight with its tokens so far. Returns their number."""
        in_flight = self.core_holder.in_flight()
        for session in self.sessions.loads():
            self.sessions.cancel(session, None, None)
        self.deliveries.cancel_all()
        return in_flight

    def reserve(self, replicas: int) -> None:
        """Reserves `replicas` or more until the next batch. Raises ValueError for other than an integer >= 0."""
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            raise ValueError(f"replicas is {replicas!r}; give an integer, 0 or more")
        self.loop.tell(ev.ReplicasReserved(self.loop.now(), replicas))

    async def update_weights(self, version: int, source: str, *known) -> WeightsLoaded | Rejected:
        """Has every replica load the folder `source` between chunks; samples in flight go on by `kv_on_update`.

        `known`: digest and score, see `Weights.want`. Returns when all hold it, or why not; see `Weights.loaded`.
        """
        await self.loop.looked.wait()
        if (refusal := await self.weights.want(version, source, *known)) is not None:
            return refusal
        self.sleep.wake_weights()
        self._follow_weights()
        return await self.weights.loaded()

    def status(self, survey: Survey | None = None) -> ServiceSnapshot:
        """Returns a snapshot of the service, the only one that status, boards, metrics and `top` read.

        `survey`: reads its next part of the samples; None: all samples are read, and no longest ones are given.
        """
        return service_snapshot(self, Survey(count=0, part=None) if survey is None else survey)

    def books(self) -> dict[str, int]:
        """Returns the number of entries in each book that must be empty when nothing is in flight."""
        return book_sizes(self)

    async def take_spans(self, trace_id: str) -> list[dict]:
        """Returns the spans of a trace that was to be kept, from here and from every replica."""
        of_replicas = await self._engines.spans(trace_id)
        return self._telemetry.take(trace_id) + of_replicas

    # ---- the loops ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs the loop: observe, log tokens that cannot be made again, decide, act. Never returns."""
        while True:
            await self.loop.woken(TICK_S)
            try:
                self.admission.exchange_core()
                self._observe()
                await self._log_tokens()
                kept = bool(self.core.replicas.kept)
                self._act(self.core.decide(ev.Tick(self.loop.now())))
                if kept:
                    self._follow_weights()
            except Exception as error:  # noqa: BLE001 - a policy's error, or a defect: the core may be half updated
                self._restart_core("turn", error)
            self.loop.turn_ends()

    async def look(self) -> None:
        """Reads the replicas' reports for ever, at once if one has changed: that replica may wait for work."""
        while True:
            await self._contain("look_at_replicas", self._look_at_replicas)
            await asyncio.sleep(1 / LOOKS_PER_S)
            await self.loop.reported(self._look_s())

    def _look_s(self) -> float:
        """Returns the seconds to the next look, if no replica reports a change."""
        return self._engines.report_s * min(1.0, LOOK_REPORTS / max(1, len(self.registry.joined)))

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
        dated = self._engines.reports()
        reports = [one.report for one in dated]
        if reports and not self._reported and self.core_holder.finishes:  # the core knows no replica of older weights
            await self.weights.find(reports, self.token_log)
            self._observe_now(ev.WeightsChanged(self.loop.now(), self.weights.version))
        self.weights.observe(reports)
        refuse_waiting(self.weights, self.batches, self.sessions, self._cancel)
        calls = self.adapters.observe(reports)
        for call in calls + self.sleep.look(reports, first=bool(reports) and not self._reported):
            self.loop.spawn(call)
        self._reported = self._reported or bool(reports)
        self.loop.looked.set()
        self._follow_weights()
        known = [(self.weights.known(report), observed_s - self.loop.began_s) for report, observed_s in dated]
        for event in self.registry.observe(known, self.loop.now(), self.weights.scores.unlike):
            self.loop.tell(event)
        self.replica_target.see(len(self.registry.joined), len(self.weights.scores.unlike))
        self._runner.watch.look(reports)
        for abort in orphans(self.registry.renewed, self._runner.calls, self.core.is_running):
            self._runner.abort(abort)
        self.loop.look_ends()
        if gone := self.deliveries.expire() + self.sessions.sweep(hasty=self.core_holder.due):
            self.contained["drivers.silent"] += gone
        self.trajectories.sweep()

    async def _poll_pool(self) -> None:
        self.kv_pool_manager.learn(self.registry.reports.values())
        for event in await self.kv_pool_manager.poll(self.loop.now()):
            self.loop.tell(event)
        self.kv_pool_manager.rest(idle=not self.batches)

    def _note(self, place: str, error: Exception) -> None:
        """Counts a contained error, and logs it."""
        self.contained[f"{place}.{type(error).__name__}"] += 1
        logging.getLogger(__name__).error("contained in %s: %s", place, one_line(error), exc_info=error)

    def _follow_weights(self) -> None:
        """Starts the loads that are due, and gives the core a new version once all older tokens are logged."""
        if not self.token_log.is_complete(self.weights.version):
            self.loop.wake()  # the next turn logs and calls this again
            return
        for load in self.weights.loads(asyncio.get_running_loop().time()):
            self.loop.spawn(load).add_done_callback(lambda _: self.loop.look_soon())
        old, new = self.core.replicas.weights_version, self.weights.version
        if new > old and self.weights.is_confirmed:
            self._observe_now(ev.WeightsChanged(self.loop.now(), new))  # a turn would first decide under the old one
            if self.kv_pool_manager is not None and drops_kv(self.core.policies.kv_on_update, old, new):
                self.kv_pool_manager.retire(old)

    async def _log_tokens(self) -> None:
        """Logs the tokens of earlier weights, if there are new ones or the weights are about to change."""
        while not self.token_log.is_complete(version := self.weights.version):
            await self.token_log.write(unlogged(self.groups(), version), version)
            self._follow_weights()

    async def _log_early(self) -> None:
        """Logs all tokens so far while turns continue: their weights may change soon."""
        if self.token_log.is_on:
            await self.token_log.write_early(unlogged(self.groups(), inf))

    def groups(self) -> list[GroupRecord]:
        """Returns all groups that their drivers have not received yet."""
        return [*self.batches.groups(), *self.deliveries.unread()]

    def _observe(self) -> None:
        for event, made in self.loop.take():
            if self.core.is_late(event):
                continue
            if isinstance(event, ev.ReplicaLeft) and not self.core.replicas.is_closing(event.replica_id):
                self.totals.faults["replica_lost"] += 1
            counts = not isinstance(event, ev.ChunkFinished) or self.core.counts_tokens(event)
            try:
                self.core.observe(event)
            except IllegalEvent as error:  # an illegal event does not change the core
                self._note(type(event).__name__, error)
                if isinstance(event, ev.ChunkFinished):
                    failed = ev.ChunkFailed(event.now, event.chunk_id, one_line(error))
                    self.core.observe(failed)
                    self.trails.observe(failed)
                continue
            self.trails.observe(event, counts)
            if made is not None and counts:  # else another chunk makes the same tokens
                self._write(made)

    def _write(self, made: MadeTokens) -> None:
        """Appends the tokens of a chunk to its sample, and counts them."""
        moved = made.sample.append(made.start.start, made.result, made.start.replica_id, *made.digests)
        made.batch.progress_s = self.loop.now()
        self.totals.wrote(made.result, moved)
        if made.result.weights_version < self.weights.version:
            self.token_log.reopen()

    def _act(self, actions: tuple) -> None:
        for action in actions:
            self.trails.act(action)
            match action:
                case ac.StartChunk():
                    self._runner.start(action, self.batches.of(action.sample_id), self.core.policies.drafting)
                case ac.AbortChunk():
                    self._runner.abort(action)
                case ac.SetReplicas():
                    self.replica_target.want(action)
                case ac.EndTurn():
                    self.totals.updates += self.batches.end_turn(action, self.core.replicas.weights_version)
                case ac.EndSample():
                    self.totals.updates += self.batches.end(action, self.core.replicas.weights_version)
                    self.totals.sample_ended(action.end)
                case ac.EmitGroup():
                    if (over := self.batches.emit(action)) is not None:
                        self.totals.batch_over(over.parts_s(self.loop.now()))
                case ac.ReleaseKv() | ac.Prefetch() if self.kv_pool_manager is not None:
                    self._act_on_pool(action)

    def _act_on_pool(self, action: ac.ReleaseKv | ac.Prefetch) -> None:
        try:
            self.kv_pool_manager.perform(action, self.batches.of, self.registry.reports)
        except Exception as error:  # noqa: BLE001 - the pool is a cache, never a dependency
            self._note("pool", error)

    # ---- batches -----------------------------------------------------------------------------------

    async def _submit(self, message: RolloutBatch, delivery: Delivery, cancels: int) -> Rejected | None:
        """Submits groups to the core, see `Deliveries`. Returns Rejected if it refuses them, else None."""
        if isinstance(batch := await self.batches.prepare(message, delivery), Rejected):
            return batch
        begun = partial(self.batches.core_ids, delivery)
        await self.admission.admitted(message.batch_id, begun)
        if (refused := self.weights.refusal(message, bool(begun()))) is not None:  # they may have changed meanwhile
            return refused
        events = [batch.submission(self.loop.now())]
        self.admission.exchange_core()
        if isinstance(self.core.policies.ordering, OracleLongestFirst):
            events.insert(0, ev.LengthsRevealed(self.loop.now(), batch.true_lengths()))
        if (refused := self._observe_now(*events)) is not None:
            return refused
        self.batches.add(batch)
        if any(spec.begun for spec in batch.specs):  # this coordinator now owns the token log's file
            self.loop.spawn(self._log_early())
        if delivery.is_over or delivery.cancels != cancels:  # its driver has left meanwhile, or it was cancelled
            self.loop.tell(ev.BatchCancelled(self.loop.now(), batch.core_id))
        return None

    def _observe_now(self, *events: ev.Event) -> Rejected | None:
        """Gives the core events of batches between two turns. Returns Rejected if it refuses one, else None."""
        self.admission.exchange_core()
        self.loop.wake()
        try:
            for event in events:
                self.core.observe(event)
        except IllegalEvent as error:
            return Rejected(reason=str(error))
        except Exception as error:  # noqa: BLE001 - a policy's error: the core's state may be half updated
            self._restart_core("submit", error)
            return Rejected(reason=f"the batch was ended by an error: {one_line(error)}")
        return None

    def _restart_core(self, place: str, error: Exception) -> None:
        """Ends every batch with a reason and starts a new core: the state of this one is unknown."""
        self._note(place, error)
        self.batches.fail(one_line(error))
        self.trails.forget_live()
        for call in self._runner.calls.values():
            call.cancel()
        self.core_holder.restart(self.registry.joined.values())
