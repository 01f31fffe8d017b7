"""Plays random rollouts against `RolloutCore`: bytes are read as operations, so a failure shrinks and replays.

`play` returns every event with the actions that came back. `Ledger` keeps the books of replicas and chunks, `KvLedger`
those of the pool, from events and actions alone, never from the core. A play ends by letting everything run out.
Called by the law tests.
"""

import pickle
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random

from kv_ledger import KvLedger, begun_tokens, new_samples
from performances import measured, performance

from tailrace.policies.core.fit_queue import STEP_TOKENS
from tailrace.policies.core.request_buffer import Batch, Sample
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.sample_states import State
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies, name_of
from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import (
    Action,
    EndTurn,
    Prefetch,
    ReleaseCause,
    ReleaseKv,
    SetReplicas,
    StartChunk,
)
from tailrace.policies.protocol.events import IllegalEvent
from tailrace.policies.protocol.performance import MethodAcceptance, Performance

ORDERINGS = ("fcfs", "group_static", "seer", "remaining_first", "oracle_longest_first")
PLACEMENTS = ("least_kv", "round_robin", "pinned", "cost_aware")
KV_ON_UPDATE = ("fresh", "keep")
CHUNKS = (13, 200, None)
FAIRNESS = ("fair_shares", "one_queue")
LANES = ("none", {"type": "auto", "min_gain": -1e9}, "clairvoyant")


@dataclass
class Books:
    """One replica as its joins and the chunks on it tell."""

    join: ev.ReplicaJoined
    version: int
    blocks: dict[str, int] = field(default_factory=dict)  # chunk_id -> blocks at its full length

    def room_tokens(self) -> int:
        """Greatest need that one more chunk may have; negative when there is no slot."""
        if len(self.blocks) >= self.join.max_running:
            return -1
        free = self.join.kv_capacity_blocks - sum(self.blocks.values())
        return free * self.join.block_tokens - self.join.draft_tokens


@dataclass
class Ledger:
    version: int = 0
    replicas: dict[str, Books] = field(default_factory=dict)
    running: dict[str, StartChunk] = field(default_factory=dict)
    specs: dict[str, ev.GroupSpec] = field(default_factory=dict)  # by sample_id; as of its present turn
    known: dict[str, int] = field(default_factory=dict)  # samples by group
    tokens: dict[str, int] = field(default_factory=dict)  # generated, by sample_id

    def note(self, event: ev.Event | ev.Tick, actions: tuple[Action, ...]) -> None:
        match event:
            case ev.SamplesSubmitted():
                self.specs |= new_samples(event, self.known)
                self.tokens |= begun_tokens(event)
            case ev.SampleReturned(sample_id=sample_id):
                spec, made = self.specs[sample_id], self.tokens.get(sample_id, 0)
                sizes = spec.prompt_tokens + event.outside_tokens, made + event.max_tokens
                self.specs[sample_id] = replace(spec, prompt_tokens=sizes[0], max_tokens=sizes[1])
            case ev.ReplicaJoined(replica_id=replica_id, weights_version=version):
                self.replicas.setdefault(replica_id, Books(event, version)).version = version
            case ev.ReplicaLeft(replica_id=replica_id):
                for chunk_id in self.replicas.pop(replica_id).blocks:
                    del self.running[chunk_id]
            case ev.WeightsChanged(version=version):
                self.version = version
            case ev.ChunkFinished(chunk_id=chunk_id) | ev.ChunkFailed(chunk_id=chunk_id):
                sample_id, new = self.running[chunk_id].sample_id, getattr(event, "new_tokens", 0)
                self.tokens[sample_id] = self.tokens.get(sample_id, 0) + new
                del self.replicas[self.running.pop(chunk_id).replica_id].blocks[chunk_id]
        for start in actions:
            if isinstance(start, StartChunk):
                books = self.replicas[start.replica_id]
                tokens = self.specs[start.sample_id].prompt_tokens + start.start + start.max_tokens
                books.blocks[start.chunk_id] = -(-(tokens + books.join.draft_tokens) // books.join.block_tokens)
                self.running[start.chunk_id] = start


@dataclass
class Play:
    core: RolloutCore
    steps: list[tuple[ev.Event | ev.Tick, tuple[Action, ...]]] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)  # breaches of liveness, found while the core was there to ask
    changed: list[str] = field(default_factory=list)  # illegal events that were taken, or that left a mark
    stale: list[str] = field(default_factory=list)  # breaches of freshness
    evicted: list[str] = field(default_factory=list)  # breaches of the order and amount of what a full pool gives up
    idle: list[str] = field(default_factory=list)  # replicas without a chunk, beside samples with a lane that waits
    hasty: list[str] = field(default_factory=list)  # prefetches for somebody else than the next in order
    closed: list[str] = field(default_factory=list)  # chunks started on replicas that were to be given back

    def actions(self, kind: type) -> list:
        return [action for _, actions in self.steps for action in actions if isinstance(action, kind)]


class Player:
    """One play: reads operations from `data`, turns them into events that are legal now, and feeds them."""

    def __init__(
        self, policies: Policies, data: bytes, limits: Limits | None = None, operations: tuple[str, ...] | None = None
    ):
        self._operations = operations or _OPERATIONS
        self.play, self.ledger = Play(RolloutCore(policies, limits=limits)), Ledger()
        self.wanted = limits.max if limits else 1_000  # replicas that the core asked for last
        self.held: set[str] = set()  # samples whose turn has ended, as a shell was told
        self.kv = KvLedger(keeps=name_of(policies.kv_on_update) == "keep")
        self.data, self.at, self.now, self.batches, self.joins = data, 0, 0.0, 0, 0
        self.ticked = -1.0  # time of the last tick

    def take(self, choices: int) -> int:
        self.at += 1
        return self.data[self.at - 1] % choices if self.at <= len(self.data) else 0

    def pick(self, options):
        return options[self.take(len(options))]

    def feed(self, event: ev.Event | ev.Tick) -> None:
        actions = ()
        if isinstance(event, ev.Tick):
            closing = {i for i in self.ledger.replicas if not self.play.core.replicas.stays(i)}
            actions = self.play.core.decide(event)
            # A replica that this decision opens again may take chunks at once: another one closes in its place.
            closing -= {i for i in closing if self.play.core.replicas.stays(i)}
            self.play.closed += [str(a) for a in actions if isinstance(a, StartChunk) and a.replica_id in closing]
            self.held |= {a.sample_id for a in actions if isinstance(a, EndTurn)}
            self.wanted = next((a.replicas for a in actions if isinstance(a, SetReplicas)), self.wanted)
        else:
            self.play.core.observe(event)
        self.ledger.note(event, actions)
        self.play.steps.append((event, actions))
        if isinstance(event, ev.Tick):
            self._look_for_starved()
            self._look_for_idle()
            self._look_at_evicted(actions)
            self._look_at_prefetched(actions)
        self.kv.note(event, actions)

    def run(self) -> Play:
        if self.play.core.policies.lanes.on:
            self.feed(ev.LengthsSeen(0.0, tuple(((), (3, 40, 9 * n, 60)) for n in range(1, 12))))
            for n in range(3):
                self.feed(ev.ReplicaJoined(0.0, f"r{n}", 16, (20, 30, 40)[n], 3, 0, 0, f"n{n % 2}"))
                self.feed(measured(0.0, f"r{n}"))
        while self.at < len(self.data):
            self.now += 1.0
            getattr(self, self.pick(self._operations))()
        self._run_out()
        return self.play

    # ---- operations ------------------------------------------------------------------------------

    def tick(self):
        self.feed(ev.Tick(self.now))

    def submit(self):
        self.batches += 1
        groups = tuple(self.group(f"b{self.batches}.{i}") for i in range(1 + self.take(3)))
        self.reveal(groups)
        self.feed(ev.SamplesSubmitted(self.now, f"b{self.batches}", groups, *self.rank()))

    def group(self, group_id: str) -> ev.GroupSpec:
        return self.begin(ev.GroupSpec(
            group_id, self.pick((1, 30, 63, 64, 150, 9_000)), 1 + self.take(4), self.pick((1, 5, 64, 130, 400)),
            self.pick(((), (), ((3, 60), (9,)), ((), (0, 900)))),
        ))  # fmt: skip

    def rank(self) -> tuple[int, float]:
        return self.pick((0, 0, 1, -1)), self.pick((1.0, 1.0, 0.5, 3.0))

    def open(self):
        self.batches += 1
        groups = tuple(self.opened(self.group(f"b{self.batches}.{i}")) for i in range(self.take(3)))
        self.reveal(groups)
        self.feed(ev.SamplesSubmitted(self.now, f"b{self.batches}", groups, *self.rank(), open=True))

    def hold(self):
        """As `open`, of samples that are held after their turns."""
        self.batches += 1
        groups = (self.opened(self.group(f"b{self.batches}.{i}")) for i in range(1 + self.take(2)))
        groups = tuple(replace(spec, hold_s=self.pick((3.0, 20.0))) for spec in groups)
        self.reveal(groups)
        self.feed(ev.SamplesSubmitted(self.now, f"b{self.batches}", groups, *self.rank(), open=True))

    def come_back(self):
        samples = self.play.core._buffer.samples
        if held := sorted(i for i in self.held if i in samples and samples[i].state is State.HELD):
            sizes = self.pick((0, 1, 20, 90)), self.pick((1, 5, 64))
            self.held.remove(sample_id := self.pick(held))
            self.feed(ev.SampleReturned(self.now, sample_id, *sizes, self.pick((0.0, 3.0, 20.0))))

    def opened(self, spec: ev.GroupSpec) -> ev.GroupSpec:
        return replace(spec, open=self.pick((True, True, False)))

    def add(self):
        """A new group, and samples for those that are open, to a batch that is open. Now and then the last ones."""
        if not (batches := [batch for batch in self.play.core._buffer.batches.values() if batch.is_open]):
            return
        batch, last = self.pick(batches), self.pick((False, False, False, True))
        known = [replace(group.spec, samples=self.take(3), past_lengths=(), begun=())
                 for group in batch.groups.values() if group.spec.open and self.take(2)]  # fmt: skip
        new = [self.group(f"{batch.batch_id}.{batch.positions}") for _ in range(self.take(2))]
        groups = tuple(self.opened(spec) for spec in (*known, *new))
        groups = tuple(replace(spec, open=False) for spec in groups) if last else groups
        self.reveal(groups)
        rank = (batch.priority, batch.share)
        self.feed(ev.SamplesSubmitted(self.now, batch.batch_id, groups, *rank, open=not last))

    def begin(self, spec: ev.GroupSpec) -> ev.GroupSpec:
        """The group, of which now and then an earlier coordinator has begun some samples."""
        if not self.pick((False, False, False, True)):
            return spec
        begun = {self.take(spec.samples): 1 + self.take(spec.max_tokens) for _ in range(1 + self.take(2))}
        return replace(spec, begun=tuple(ev.Begun(i, tokens, self.take(4) == 3) for i, tokens in begun.items()))

    def reveal(self, groups):
        policies = self.play.core.policies
        if name_of(policies.ordering) == "oracle_longest_first" or policies.lanes.sees_truth:
            event = ev.SamplesSubmitted(self.now, "", groups)
            lengths = {sample_id: 1 + self.take(99) for sample_id in new_samples(event, dict(self.ledger.known))}
            self.feed(ev.LengthsRevealed(self.now, lengths))

    def finish(self):
        if self.ledger.running:
            start = self.pick(sorted(self.ledger.running.values(), key=lambda s: s.chunk_id))
            end = self.pick((ev.ChunkEnd.LENGTH, ev.ChunkEnd.LENGTH, *ev.ChunkEnd))
            full = end is ev.ChunkEnd.LENGTH and self.take(4)
            tokens = start.max_tokens if full else self.take(1 + start.max_tokens)
            context = self.kv.context_tokens(start.sample_id) + tokens
            stored = self.pick((context, 0, self.take(1 + context), context - context % 16))
            self.feed(ev.ChunkFinished(self.now, start.chunk_id, tokens, end, start.weights_version, stored))

    def fail(self):
        if self.ledger.running:
            self.feed(ev.ChunkFailed(self.now, self.pick(sorted(self.ledger.running)), "engine fell over"))

    def stream(self):
        if self.ledger.running:
            start = self.ledger.running[self.pick(sorted(self.ledger.running))]
            before, tokens = self.view(start.sample_id), self.take(1 + start.max_tokens)
            observed_at = self.now - self.take(40) / 2
            self.feed(ev.TokensStreamed(self.now, {start.chunk_id: tokens, "nobody#0:0": 1}, observed_at))
            view = self.view(start.sample_id)
            seen = (before.streamed_tokens, before.observed_at)
            if observed_at >= before.observed_at:
                seen = (max(before.streamed_tokens, tokens), observed_at)
            if (view.streamed_tokens, view.observed_at) != seen:
                self.play.stale.append(f"{before} -> {view} by {tokens} tokens at {observed_at}")

    def view(self, sample_id: str):
        return self.play.core._buffer.samples[sample_id].view()

    def join(self):
        self.joins += 1
        block = self.pick((1, 16, 24, 32))
        self.feed(
            ev.ReplicaJoined(
                self.now, f"r{self.joins * 7 % 10}", block, self.pick((100, 210, 400, 700)) // block,
                self.pick((1, 2, 4)), self.pick((0, 3, 9)), max(0, self.ledger.version + self.pick((0, 0, 0, 1, -1))),
                self.pick(("n1", "n2")),
            )
        )  # fmt: skip

    def rejoin(self):
        if self.ledger.replicas:
            books = self.ledger.replicas[self.pick(sorted(self.ledger.replicas))]
            self.feed(rejoined(books.join, self.now, self.ledger.version))

    def lose(self):
        if self.ledger.replicas:
            self.feed(ev.ReplicaLeft(self.now, self.pick(sorted(self.ledger.replicas)), "node gone"))

    def obey(self):
        """As Serve does: the first in order goes while there are more than the core has asked for."""
        if len(self.ledger.replicas) > self.wanted:
            self.feed(ev.ReplicaLeft(self.now, self.play.core.replicas.stop_order()[0], "given back"))

    def weights(self):
        self.feed(ev.WeightsChanged(self.now, self.ledger.version + self.take(3)))

    def measure(self):
        if self.ledger.replicas:
            replica_id = self.pick(sorted(self.ledger.replicas))
            before = self.play.core.replicas.view(replica_id).performance
            rates = (self.pick((100.0, 3000.0)), self.pick((0.0, 50.0, 20_000.0)), self.pick((0.0, 0.01, 2.0)))
            found = performance(
                *rates,
                self.pick((0.0, 0.02)),
                self.pick((0.0, 0.01)),
                self.now - self.take(9),
                made=self.pick((1.0, 2.5)),
            )
            self.feed(ev.ReplicaMeasured(self.now, replica_id, found))
            known = before if before and before.observed_at > found.observed_at else found
            if (after := self.play.core.replicas.view(replica_id).performance) != known:
                self.play.stale.append(f"{before} -> {after} by {found}")

    def report(self):
        capacity = self.pick((0, 500, 2_000))
        used = capacity * self.pick((100, 95, 90, 50, 110)) // 100
        self.feed(ev.PoolReported(self.now, capacity, used, self.now - self.take(3)))

    def lose_kv(self):
        """After a tick, so that no release is on its way while the pool loses what it is for."""
        self.tick()
        some = ("nobody#0", *sorted(self.kv.held)[: self.take(4)])
        self.feed(ev.KvLost(self.now, self.pick((some, None))))

    def cancel(self):
        if alive := sorted(self.play.core._buffer.batches):
            self.feed(ev.BatchCancelled(self.now, self.pick(alive)))

    def cancel_one(self):
        if alive := sorted(self.play.core._buffer.samples):
            self.feed(ev.SampleCancelled(self.now, self.pick(alive)))

    def illegal(self):
        core, before = self.play.core, pickle.dumps(self.play.core)
        batches, samples = core._buffer.batches.values(), sorted(core._buffer.samples)
        closed = sorted(batch.batch_id for batch in batches if not batch.is_open)
        events = illegal_events(self.now, self.ledger, closed, samples)
        is_open = [batch for batch in batches if batch.is_open]
        event = self.pick(events + [event for batch in is_open[:1] for event in misfits(self.now, batch)])
        try:
            core.observe(event)
        except IllegalEvent:
            if pickle.dumps(core) != before:
                self.play.changed.append(f"{event} was refused but left a mark")
        else:
            self.play.changed.append(f"{event} was taken")

    # ---- the end, and what only the core can be asked ----------------------------------------------

    def _run_out(self) -> None:
        """One more replica, every replica on the current weights, and chunks end until nothing is left."""
        self.now += 1.0
        for batch in [batch for batch in self.play.core._buffer.batches.values() if batch.is_open]:
            self.feed(ev.SamplesSubmitted(self.now, batch.batch_id, (), batch.priority, batch.share))
        self.feed(ev.ReplicaJoined(self.now, "last", 16, 64, 4, 0, self.ledger.version))
        for replica_id in sorted(self.ledger.replicas):
            self.feed(rejoined(self.ledger.replicas[replica_id].join, self.now, self.ledger.version))
        tokens = sum(spec.max_tokens for spec in self.ledger.specs.values())  # of held ones, those of all turns
        for _ in range(2 + tokens):  # far more than any rollout takes: a chunk has a token at least
            self.now += 1000.0  # pauses after failures are over
            self.feed(ev.Tick(self.now))
            if not self.ledger.running or any(s.max_tokens < 1 for s in self.ledger.running.values()):
                return
            for start in list(self.ledger.running.values()):
                made = (start.chunk_id, start.max_tokens, ev.ChunkEnd.LENGTH, start.weights_version)
                context = self.kv.context_tokens(start.sample_id) + start.max_tokens
                self.feed(ev.ChunkFinished(self.now, *made, context - context % 16))

    def _look_at_evicted(self, actions: tuple[Action, ...]) -> None:
        """Whoever waits with KV of its own is needed before all that were given up, or the pool is roomy by now."""
        given_up = [a.sample_id for a in actions if isinstance(a, ReleaseKv) and a.cause is ReleaseCause.FULL]
        left, expected = self.kv.too_full_by(), []
        if left <= 0 and not given_up:
            return
        waiting = {
            sample_id: self.key(sample)
            for sample_id, sample in self.play.core._buffer.samples.items()
            if sample.state in (State.WAITING, State.HELD)
            and self.kv.own_tokens(sample_id)
            and not self.play.core._failures.is_paused(sample)
        }
        for sample_id in sorted(waiting, key=waiting.get, reverse=True):
            if left > 0:
                expected.append(sample_id)
                left -= self.kv.own_tokens(sample_id)
        if given_up != expected:
            self.play.evicted.append(f"{given_up}, not {expected}, at {self.now}")

    def _look_at_prefetched(self, actions: tuple[Action, ...]) -> None:
        """Each is for the first in order of those that wait for the same replicas (the depth of these plays is 1)."""
        waiting, ordering = self.play.core._waiting, self.play.core.policies.ordering
        for action in actions:
            if isinstance(action, Prefetch):
                sample = self.play.core._buffer.samples[action.sample_id]
                lane = ordering.lane(waiting._picks)
                mates = [mate for mate in waiting.samples() if mate.home == sample.home]
                if sample.home not in (None, action.replica_id) or sample is not min(
                    mates, key=lambda mate, lane=lane: self.key(mate, lane), default=None
                ):
                    self.play.hasty.append(f"{action} at {self.now}")

    def key(self, sample: Sample, lane: int = 0) -> tuple:
        ordering, view = self.play.core.policies.ordering, sample.view()
        if name_of(ordering) == "oracle_longest_first":
            keys = ordering.keys_of_length(view, self.play.core._waiting._lengths)
        else:
            keys = ordering.keys(view, sample.group.view())
        fairness, batch = self.play.core.policies.fairness, sample.group.batch
        turn = (*fairness.key(batch.view()), batch.arrival) if fairness.apart else ()
        return turn, (*keys[lane], view.arrival, view.index)

    def _look_for_starved(self) -> None:
        """Law 7 by brute force: every waiting sample against every replica that it may go to."""
        core, version = self.play.core, self.ledger.version
        ready = {i: books for i, books in self.ledger.replicas.items() if books.version == version}
        rooms = {i: books.room_tokens() for i, books in ready.items() if core.replicas.stays(i)}
        if not any(room > 0 for room in rooms.values()):  # as every sample needs some
            return
        for sample in core._buffer.samples.values():
            parked = core._trajectories.is_parked(sample)
            if sample.state is State.WAITING and not parked and not core._failures.is_paused(sample):
                need = -(-self._need_tokens(sample.sample_id) // STEP_TOKENS) * STEP_TOKENS
                for replica_id, room in rooms.items():
                    if sample.home in (None, replica_id) and need <= room:
                        self.play.starved.append(f"{sample.sample_id} ({need}) and {replica_id} at {self.now}")

    def _look_for_idle(self) -> None:
        """Lanes leave no replica without a chunk, if a sample waits for room on another one and fits there."""
        core, before, self.ticked = self.play.core, self.ticked, self.now
        if not core.policies.lanes.on or self.now - before < 1.0:
            return
        idle = [i for i in core.replicas.ready() if not core.replicas.running(i)]
        for sample in core._buffer.samples.values():
            if core._lanes.is_lane(sample) and sample in core._waiting:
                self.play.idle += [
                    f"{sample.sample_id} waits for {sample.home}, {i} is idle at {self.now}"
                    for i in idle
                    if core.replicas.performance(i) and core._lanes.fits(sample, i)
                ]

    def _need_tokens(self, sample_id: str) -> int:
        view = self.view(sample_id)
        return view.prompt_tokens + view.generated_tokens + self.play.core.policies.chunking.tokens(view)


_OPERATIONS = (
    ("tick",) * 6 + ("finish",) * 7 + ("submit",) * 3 + ("fail",) * 2 + ("stream",) * 2 + ("join",) * 2
    + ("rejoin",) * 3 + ("measure",) * 2 + ("report",) * 3 + ("obey",) * 2
    + ("lose", "lose_kv", "weights", "cancel", "illegal")
)  # fmt: skip

OPEN_BATCHES = (*_OPERATIONS, *("open",) * 3, *("add",) * 6, *("cancel_one",) * 2)
"""With open batches, too. Plays kept as bytes were made without."""

TURNS = (*OPEN_BATCHES, *("hold",) * 3, *("come_back",) * 6)
"""With samples of several turns, too."""


LANE_PLAYS = (
    ("tick",) * 7 + ("finish",) * 10 + ("stream",) * 4 + ("measure",) * 3 + ("join",) * 2 + ("rejoin",) * 2 + ("fail",)
    + ("submit", "cancel_one", "lose", "weights", "hold", "come_back", "come_back", "illegal")
)  # fmt: skip
"""With few batches, so that mostly one is in flight. Plays with lanes begin on three measured replicas."""


def rejoined(join: ev.ReplicaJoined, now: float, version: int) -> ev.ReplicaJoined:
    sizes = (join.block_tokens, join.kv_capacity_blocks, join.max_running, join.draft_tokens)
    return ev.ReplicaJoined(now, join.replica_id, *sizes, version)


def illegal_events(now: float, ledger: Ledger, closed: list[str], samples: list[str]) -> list:
    """Events that cannot happen now, of every kind that can be made from what is there."""
    fine, free = ev.GroupSpec("new", 1, 1, 1), ev.ChunkEnd.LENGTH
    events = [
        ev.ChunkFinished(now, "nobody#0:0", 1, free, 0),
        ev.ChunkFailed(now, "nobody#0:0", "late"),
        ev.ReplicaLeft(now, "nobody", "late"),
        ev.BatchCancelled(now, "nobody"),
        ev.SampleCancelled(now, "nobody#0"),
        ev.SampleReturned(now, "nobody#0", 0, 1),
        ev.SamplesSubmitted(now, "new", (replace(fine, hold_s=-1.0),)),
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec("new", 1, 1, 1, open=True),)),
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec("new", 1, -1, 1),)),
        ev.WeightsChanged(now, ledger.version - 1),
        measured(now, "nobody"),
        ev.PoolReported(now, -1, 0, now),
        ev.PoolReported(now, 10, -1, now),
        ev.ReplicaJoined(now, "nobody", 0, 10, 1, 0, ledger.version),
        ev.ReplicaJoined(now, "nobody", 16, 10, 1, -1, ledger.version),
        ev.SamplesSubmitted(now, "new", ()),
        ev.SamplesSubmitted(now, "new", (fine, fine)),
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec("new", 0, 1, 1),)),
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec("new", 1, 0, 1),)),
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec("new", 1, 1, 0),)),
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec("new", 1 << 24, 1, 1),)),
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec("new", 1, 1, 1, ((5, -1),)),)),
        ev.Tick(now),
        "not an event",
    ]
    events += [ev.SamplesSubmitted(now, batch_id, (fine,)) for batch_id in closed[:1]]
    events += [
        ev.SamplesSubmitted(now, "new", (ev.GroupSpec(sample_id.rpartition("#")[0], 1, 1, 1),))
        for sample_id in samples[:1]
    ]
    for start in list(ledger.running.values())[:1]:
        made, version = (now, start.chunk_id), start.weights_version
        events += [
            ev.ChunkFinished(*made, start.max_tokens + 1, free, version),
            ev.ChunkFinished(*made, -1, free, version),
            ev.ChunkFinished(*made, 1, free, version + 1),
            ev.ChunkFinished(*made, 0, free, version, -1),
            ev.ChunkFinished(*made, 0, free, version, 1 + ledger.specs[start.sample_id].prompt_tokens + start.start),
            ev.SampleReturned(now, start.sample_id, 0, 1),
            measured(now, start.replica_id, made=0.5),
            measured(now, start.replica_id, 1.0, -1.0),
            measured(now, start.replica_id, base=float("nan")),
            measured(now, start.replica_id, acceptance=(MethodAcceptance("group", 3.0, 2.0),)),
            ev.ReplicaMeasured(now, start.replica_id, Performance(now, (1.0, 1.0), (0.1, 0.2))),
            ev.ReplicaMeasured(now, start.replica_id, Performance(now, (), ())),
            ev.ChunkFinished(*made, 0, free, version, tested_tokens=1),
        ]
    return events


def misfits(now: float, batch: Batch) -> list:
    """Events that an open batch must refuse."""
    rank, name = (batch.priority, batch.share), batch.batch_id
    events = [ev.SamplesSubmitted(now, name, (), batch.priority + 1, batch.share, open=True)]
    for spec in [group.spec for group in batch.groups.values()]:
        more = replace(spec, samples=1, past_lengths=(), begun=())
        if spec.open:
            others = replace(more, prompt_tokens=spec.prompt_tokens + 1), replace(more, past_lengths=((1,),))
            events += [ev.SamplesSubmitted(now, name, (other,), *rank, open=True) for other in others]
            events.append(ev.SamplesSubmitted(now, name, (more,), *rank))
            events.append(ev.SamplesSubmitted(now, "new", (more,), *rank, open=True))
        else:
            events.append(ev.SamplesSubmitted(now, name, (more,), *rank, open=True))
    return events


def policies_of(
    ordering: str, placement: str, chunk_tokens: int | None, kv_on_update: str = "fresh", fairness: str = "fair_shares",
    lanes: dict | str = "none",
) -> Policies:  # fmt: skip
    return Policies(
        ordering=ordering,
        placement=placement,
        chunking={"type": "fixed", "chunk_tokens": chunk_tokens},
        kv_on_update=kv_on_update,
        fairness=fairness,
        lanes=lanes,
    )


def play(
    policies: Policies, data: bytes, limits: Limits | None = None, operations: tuple[str, ...] | None = None
) -> Play:
    return Player(policies, data, limits, operations).run()


def replay(policies: Policies, steps: list) -> list[tuple[Action, ...]]:
    """The actions a fresh core gives for the events of a play."""
    core = RolloutCore(policies)
    return [core.decide(event) if isinstance(event, ev.Tick) else core.observe(event) or () for event, _ in steps]


def digest() -> str:
    """Of all actions of one fixed play for every combination of policies: what any process must come to."""
    texts = []
    for number, ordering in enumerate(ORDERINGS):
        for placement in PLACEMENTS:
            for chunk_tokens in CHUNKS:
                data = Random(number).randbytes(400)
                pair = KV_ON_UPDATE[number % 2], FAIRNESS[number % 2]
                texts.append(repr(play(policies_of(ordering, placement, chunk_tokens, *pair), data).steps))
    return blake2b("\n".join(texts).encode()).hexdigest()
