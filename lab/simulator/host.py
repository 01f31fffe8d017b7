"""The simulated host of `RolloutCore`: it drives the same core as the coordinator of the service, on a clock that
jumps.

One turn reads observe, decide, act, as `deployments.coordinator.rollouts` does. Events of one instant are all observed
before the core decides once. Invariant: the core gets no more than in the service (law 3), and a run is a function of
its arguments. Tokens are streamed once a tick, if lanes, outliers or the tail read them. Not modelled: where in the
pool KV lies (one speed for all of it), and a pool that runs full. A step is submitted once no sample of the last one
runs, beaten copies included. Called by `tailrace simulate` by way of `simulate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from tailrace.lab.simulator.checks import Checks, check_step
from tailrace.lab.simulator.chunks import GroupProgress, SimulatedChunk, SimulatedSample
from tailrace.lab.simulator.fleet import ModelledFleet
from tailrace.lab.simulator.occupancy_series import OccupancySeries
from tailrace.lab.simulator.replica import ModelledReplica
from tailrace.lab.simulator.speculation import AcceptanceSource, Speculation, by_policy
from tailrace.lab.simulator.types import TURN_MARK, Cluster, Ended, Moment, SimulatedRun, Span, Workload, WorkloadGroup
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import (
    AbortChunk,
    Action,
    EmitGroup,
    EndSample,
    EndTurn,
    ReleaseKv,
    SampleEnd,
    SetReplicas,
    StartChunk,
)
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import MethodAcceptance

HOLD_S = 3600.0
"""Seconds for which a sample is held between two turns: the longest that a session takes."""

KEPT_S = 60.0
"""Seconds for which the pool keeps the prompt of a request that has ended (`IDLE_S` of
`deployments.batches.open_sessions`).
"""

TESTED = 1000.0
"""Draft tokens that a replica has tested before a run, faded: only their share of right ones matters."""

TICK_S = 1.0
"""Seconds between ticks without other events, at which the core looks around by itself: in the service it looks more
often, and waits as long between two looks for races, and before it gives replicas back.
"""


def simulate(
    workload: Workload,
    cluster: Cluster,
    policies: Policies,
    *,
    seed: int = 0,
    admission: bool = True,
    acceptance: AcceptanceSource | None = None,
    speculation: Callable[[int], Speculation] | None = None,
    spans: bool = False,
    check: bool = False,
    reveal: bool = False,
    elastic: Limits | None = None,
    holds: bool = True,
    system: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> SimulatedRun:
    """Rolls the workload out, step by step, each submitted when the last one has ended. `admission`: the core reserves
    KV; without it replicas queue and preempt as vLLM does. Drafts are made by `policies.drafting` with chances by
    `acceptance`, or by the `speculation` of a replica's index; with neither there are none. `elastic`: within these
    limits `policies.tail` says how many replicas there are; a start takes the model's start_s. `reveal`: true lengths
    go to the core, which only `oracle_longest_first` takes. `holds`: a sample is held between its turns; else each turn
    is a new request that is related to no other. `check`: raise LawBroken if a law breaks. `progress` gets the numbers
    of ended and all samples. Raises ValueError if a sample can never fit on a replica, or fails, and for
    `policies.racing` without a `speculation` that knows its methods.
    """
    if speculation is None:
        if policies.racing.room:
            raise ValueError(
                "policies.racing: copies draft by methods of their own, for which `speculation` has to say"
            )
        speculation = by_policy(policies.drafting, acceptance, cluster.replica.step, seed)
    kept = [] if spans else None
    fleet = ModelledFleet(cluster, speculation, kept, usual_drafts(workload, acceptance) if policies.lanes.on else ())
    host = SimulatedHost(
        workload=workload,
        fleet=fleet,
        policies=policies,
        admission=admission,
        reveal=reveal,
        elastic=elastic,
        spans=kept,
        check=check,
        progress=progress,
        holds=holds,
    )
    host.run()
    return host.result(system, seed)


def usual_drafts(workload: Workload, acceptance: AcceptanceSource | None) -> tuple[MethodAcceptance, ...]:
    """Returns the drafts that replicas have tested in a step before the workload's; none if there was no such step."""
    if acceptance is None or not workload.earlier:
        return ()
    chances = [acceptance.chance(g, 0, 0, len(g.lengths) - 1, len(g.past_lengths)) for g in workload.earlier]
    return (MethodAcceptance(DraftMethod.GROUP, TESTED * sum(chances) / len(chances), TESTED),)


class SimulatedHost:
    """The host of the module docstring. Its hooks (`_begin`, `_acted`, `_took`, `_group_ended`) are for a learner."""

    overlaps = False
    """Whether several steps are in flight; then samples of the earlier one go first."""

    def __init__(self, *, workload, fleet, policies, admission, reveal, elastic, spans, check, progress, holds=True):
        self._workload, self._fleet, self._admission, self._reveal = workload, fleet, admission, reveal
        self._spans, self._progress = spans, progress
        self._core = RolloutCore(policies, limits=elastic)
        self._booked = [inf] * len(fleet.replicas)  # time of each replica's next turn in the heap
        self._heap: list[tuple] = []  # (time, number, function, argument)
        self._inbox: list[ev.Event] = []
        self._now, self._number, self._events = 0.0, 0, 0
        self._step, self._samples = -1, {}
        self._running: dict[str, SimulatedChunk] = {}
        self._holds = holds
        self._away = 0  # samples whose tools run
        self._total = sum(len(group.lengths) for step in workload.steps for group in step)
        self._ended: list[Ended] = []
        self._moments = OccupancySeries(self._moment)
        self._checks = Checks(admission, overlaps=self.overlaps) if check else None
        self._streams = policies.lanes.on or self._core.outliers.on or elastic is not None
        self._looks = policies.racing.room > 0 or self._streams
        self._ticks, self._ticked = False, False  # whether the next one is in the heap; whether one is due now

    # ---- the loop --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Observes, decides and acts, until nothing is left to happen."""
        self._begin()
        while True:
            while self._inbox or self._ticked:
                self._observe()
                self._act(self._core.decide(ev.Tick(self._now)))
                self._acted()
            if not self._heap:
                break
            self._moments.note(self._now, self._heap[0][0])
            self._now = self._heap[0][0]
            while self._heap and self._heap[0][0] == self._now:
                _, _, do, subject = heappop(self._heap)
                self._events += 1
                do(subject)
        if self._checks:
            self._checks.end(sum(ended.preemptions for ended in self._ended))

    def _begin(self) -> None:
        """Runs at the first instant."""
        self._submit()

    def _acted(self) -> None:
        """Runs after the actions of a decision: submits the next step, once nothing is left of the last one."""
        if len(self._ended) < self._total and not (self._samples or self._running or self._away):
            self._submit()

    def _took(self, chunk: SimulatedChunk) -> None:
        """Runs after a chunk's tokens have been added to its sample."""

    def _group_ended(self, group_id: str) -> None:
        """Runs after all samples of a group have ended."""

    def _observe(self) -> None:
        inbox, self._inbox, self._ticked = self._inbox, [], False
        self._events += len(inbox)
        for event in inbox:
            if self._checks:
                self._checks.event(event)
            if isinstance(event, ev.ChunkFinished):
                chunk = self._running.pop(event.chunk_id)
                if self._core.counts_tokens(event):
                    chunk.sample.take(chunk)
                    self._took(chunk)
            self._core.observe(event)

    def _act(self, actions: tuple[Action, ...]) -> None:
        touched: dict[int, None] = {}
        for action in actions:
            if self._checks:
                self._checks.action(action)
            match action:
                case StartChunk():
                    self._start(action, touched)
                case AbortChunk():
                    self._abort(action, touched)
                case EndTurn():
                    self._leave(self._samples[action.sample_id])
                case EndSample():
                    self._end(action)
                case EmitGroup():
                    self._group_ended(action.group_id)
                case ReleaseKv():
                    self._drop_kv(action)
                case SetReplicas():
                    self._resize(action.replicas)
        for index in touched:
            self._book(self._fleet.replicas[index])
        if self._looks and self._samples and not self._ticks:
            self._ticks = True
            self._at(self._now + TICK_S, self._tick, None)

    def _tick(self, _) -> None:
        self._ticks, self._ticked = False, bool(self._samples)
        if self._streams and self._running:
            tokens = {chunk_id: chunk.replica.made_at(chunk, self._now) for chunk_id, chunk in self._running.items()}
            self._inbox.append(ev.TokensStreamed(self._now, tokens, self._now))

    def _at(self, time_s: float, do: Callable, subject) -> None:
        self._number += 1
        heappush(self._heap, (time_s, self._number, do, subject))

    # ---- steps and samples ---------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Submits the next step's groups."""
        self._begin_step()
        self._submit_specs(self._workload.steps[self._step])

    def _begin_step(self) -> None:
        self._step += 1
        if not self._step:
            self._inbox += self._fleet.joins(range(len(self._fleet.replicas)), self._admission, self._now)
            seen = tuple((group.past_lengths, group.lengths) for group in self._workload.earlier)
            self._inbox += [ev.LengthsSeen(self._now, seen)] if seen and self._streams else []
        check_step(self._workload, self._step, self._fleet.room_tokens())

    def _submit_specs(self, groups: Sequence[WorkloadGroup], is_open: bool = False) -> None:
        """Submits groups of the present step, with their true lengths if all is revealed. `is_open`: more come."""
        max_tokens, added = self._workload.max_tokens, []
        for group in groups:
            progress = GroupProgress(group, self._step)
            added += [SimulatedSample(progress, index, self._now) for index in range(len(group.lengths))]
        self._samples |= {sample.sample_id: sample for sample in added}
        lengths = {sample.sample_id: sample.length if self._holds else sample.until for sample in added}
        if self._checks:
            self._checks.submit(lengths)
        if self._reveal:
            self._inbox.append(ev.LengthsRevealed(self._now, lengths))
        specs = (
            ev.GroupSpec(
                group_id=g.group_id,
                prompt_tokens=g.prompt_tokens,
                samples=len(g.lengths),
                max_tokens=max_tokens,
                past_lengths=g.past_lengths,
                hold_s=HOLD_S if g.gaps and self._holds else 0.0,
            )
            for g in groups
        )
        requests = not self._holds and any(group.gaps for group in groups)
        self._inbox.append(self._batch(tuple(specs), is_open=is_open or requests))

    def _batch(self, specs: tuple[ev.GroupSpec, ...], is_open: bool = False) -> ev.SamplesSubmitted:
        """Returns groups of the present step. `is_open`: more come."""
        return ev.SamplesSubmitted(
            now=self._now,
            batch_id=f"step-{self._step}",
            groups=specs,
            priority=-self._step if self.overlaps else 0,
            step=self._step,
            open=is_open,
        )

    # ---- chunks ----------------------------------------------------------------------------------------------

    def _start(self, action: StartChunk, touched: dict[int, None]) -> None:
        sample, replica = self._samples[action.sample_id], self._fleet.by_id[action.replica_id]
        if action.copy_of is None:
            sample.chunks += 1
            sample.moves += sample.replica not in (None, replica)
            sample.replica = replica
        tokens = min(action.max_tokens, sample.until - sample.made)
        chunk = SimulatedChunk(action.chunk_id, sample, tokens, action.expected_tokens, action.class_starts)
        chunk.replica, chunk.method, chunk.weights_version = replica, action.method, action.weights_version
        if action.kv_version != sample.kv_version:  # KV of other weights is never read
            sample.kv_version, sample.freed_kv = action.kv_version, None
        self._running[action.chunk_id] = chunk
        self._send(chunk, action.min_pull_tokens, touched)

    def _send(self, chunk: SimulatedChunk, min_pull_tokens: int | None, touched: dict[int, None]) -> None:
        replica = chunk.replica
        fetch_s = self._fleet.bring(chunk, min_pull_tokens, self._now)
        if fetch_s:
            begin_s = replica.boundary_s(self._now)  # an engine begins to pull between two steps
            until_s = begin_s + fetch_s
            if self._spans is not None:
                self._spans.append(
                    Span(
                        replica=replica.index,
                        sample_id=chunk.sample.sample_id,
                        role="fetch",
                        begin_s=begin_s,
                        end_s=until_s,
                        tokens=chunk.pulled,
                    )
                )
            self._at(until_s, self._arrive, chunk)
        else:
            replica.submit(chunk, self._now)
            touched[replica.index] = None

    def _arrive(self, chunk: SimulatedChunk) -> None:
        if not chunk.over:  # stopped on its way
            chunk.replica.submit(chunk, self._now)
            self._book(chunk.replica)

    def _abort(self, action: AbortChunk, touched: dict[int, None]) -> None:
        chunk = self._running[action.chunk_id]
        if not chunk.over:  # else its KV is being saved, and it ends by itself
            chunk.keeps = action.keep_kv
            chunk.replica.abort(chunk, self._now)
            touched[chunk.replica.index] = None

    def _book(self, replica: ModelledReplica) -> None:
        if replica.due_s < inf and replica.due_s != self._booked[replica.index]:
            self._booked[replica.index] = replica.due_s
            self._at(replica.due_s, self._turn, replica)

    def _turn(self, replica: ModelledReplica) -> None:
        if replica.due_s != self._now:
            return  # it was booked again since
        self._booked[replica.index] = inf
        for chunk in replica.turn():
            self._stopped(chunk)
        self._book(replica)
        for mate in self._fleet.crowd(replica, self._now):
            self._book(mate)

    def _stopped(self, chunk: SimulatedChunk) -> None:
        """Ends a chunk's stay on its replica; if its sample continues, its new KV goes to the pool first."""
        chunk.over = True
        sample = chunk.sample
        goes_on = chunk.keeps and chunk.generated < (sample.length if self._holds else sample.until)
        model = self._fleet.model
        if goes_on and model.fetch_tokens_s:
            save_s = self._fleet.save_s(chunk)
            chunk.stored = chunk.context + int(chunk.made)
            self._at(self._now + save_s, self._saved, chunk)
        elif goes_on and model.handover_s:
            self._at(self._now + model.handover_s, self._finish, chunk)
        else:
            self._finish(chunk)

    def _saved(self, chunk: SimulatedChunk) -> None:  # an engine looks between two steps, and hands over its result
        self._at(chunk.replica.boundary_s(self._now) + self._fleet.model.handover_s, self._finish, chunk)

    def _finish(self, chunk: SimulatedChunk) -> None:
        end = ev.ChunkEnd.ABORTED if chunk.aborted else ev.ChunkEnd.LENGTH
        if chunk.generated == chunk.sample.until < self._workload.max_tokens:
            end = ev.ChunkEnd.STOP
        drafted, accepted = round(chunk.drafted), min(round(chunk.drafted), round(chunk.accepted))
        self._inbox.append(
            ev.ChunkFinished(
                now=self._now,
                chunk_id=chunk.chunk_id,
                new_tokens=int(chunk.made),
                end=end,
                weights_version=chunk.weights_version,
                stored_tokens=chunk.stored,
                drafted_tokens=drafted,
                accepted_tokens=accepted,
                tested_tokens=min(drafted, max(accepted, round(chunk.tested))),
            )
        )
        self._inbox += self._fleet.measured(chunk.replica, self._now)

    # ---- how many replicas there are -----------------------------------------------------------------------

    def _resize(self, wanted: int) -> None:
        begin, left = self._fleet.resize(wanted, self._now)
        self._inbox += left
        for index in begin:
            self._at(self._fleet.starting[index], self._up, index)

    def _up(self, index: int) -> None:
        if self._fleet.starting.get(index) == self._now:  # else it was called off
            self._inbox += self._fleet.joins((index,), self._admission, self._now)

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end(self, action: EndSample) -> None:
        if action.end not in (SampleEnd.STOP, SampleEnd.LENGTH):
            raise ValueError(f"{action.sample_id} ended as {action.end}: {action.error}")
        sample = self._samples.pop(action.sample_id)
        if sample.gap is not None:
            keeps = self._fleet.model.fetch_tokens_s and sample.gap.tool_s < KEPT_S
            sample.stored = sample.began_with if keeps else 0  # the answer's has been released with its request
            self._leave(sample)
            return
        self._ended.append(
            Ended(
                sample_id=sample.name,
                step=sample.progress.step,
                tokens=sample.made,
                submitted_s=sample.submitted_s,
                ended_s=self._now,
                chunks=sample.chunks,
                moves=sample.moves,
                preemptions=sample.preemptions,
                recomputed_tokens=sample.recomputed,
                verifications=sample.verifications,
                drafted=sample.drafted,
                accepted=sample.made - sample.verifications,
                turns=sample.turn + 1,
                returned_tokens=sample.returned,
            )
        )
        if not (self._holds or self._samples or self._away) and sample.gaps:
            self._inbox.append(self._batch(()))
        if self._progress:
            self._progress(len(self._ended), self._total)

    # ---- turns -----------------------------------------------------------------------------------------------

    def _leave(self, sample: SimulatedSample) -> None:
        """Ends a turn: its tool runs. A sample that has but one turn has no tool, and its driver says so."""
        if sample.gap is None:
            self._inbox.append(ev.SampleCancelled(self._now, sample.sample_id))
            return
        self._away += 1
        self._at(self._now + sample.gap.tool_s, self._come_back, sample)

    def _come_back(self, sample: SimulatedSample) -> None:
        self._away -= 1
        outside_tokens, most = sample.gap.outside_tokens, self._workload.max_tokens - sample.made
        sample.begin_turn()
        if self._holds:
            hold_s = HOLD_S if sample.gap else 0.0
            self._inbox.append(ev.SampleReturned(self._now, sample.sample_id, outside_tokens, most, hold_s))
            return
        group_id = f"{sample.name}{TURN_MARK}{sample.turn}"
        sample.sample_id, sample.begun = f"{group_id}#0", False
        sample.progress = GroupProgress(replace(sample.progress.group, past_lengths=()), sample.progress.step)
        self._samples[sample.sample_id] = sample
        if self._checks:
            self._checks.turn(sample.sample_id, sample.until - sample.made)
        self._inbox.append(self._batch((ev.GroupSpec(group_id, sample.context, 1, most),), is_open=True))

    def _drop_kv(self, action: ReleaseKv) -> None:
        sample = self._samples.get(action.sample_id)
        if sample is not None:  # else it has ended, or the prompt's is meant: neither is read again
            sample.stored = 0

    def _moment(self, now: float) -> Moment:
        chunks, kv_tokens = self._fleet.load(now)
        running = min(chunks, len(self._samples))  # of a race, one counts
        return Moment(now, running, len(self._samples) - running, kv_tokens, self._fleet.occupying(now))

    def result(self, system: str, seed: int) -> SimulatedRun:
        makespan_s = max(ended.ended_s for ended in self._ended)
        moments, spans = self._moments.all(makespan_s), tuple(self._spans or ())
        return SimulatedRun(
            system=system,
            workload=self._workload.name,
            seed=seed,
            makespan_s=makespan_s,
            ended=tuple(self._ended),
            moments=moments,
            spans=spans,
            events=self._events,
            bounds={},
        )
