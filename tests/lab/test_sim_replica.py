"""A replica's closed form against one that takes every step: times, preemptions and what is computed again."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from random import Random

import pytest

from tailrace.lab.simulator.chunks import GroupProgress, SimulatedChunk, SimulatedSample
from tailrace.lab.simulator.replica import ModelledReplica
from tailrace.lab.simulator.speculation import Pace, PlainDecoding
from tailrace.lab.simulator.types import ReplicaModel, Span, StepModel, WorkloadGroup


class Steady(PlainDecoding):
    """So many tokens a step for every chunk, whose pace holds for a few steps only; a floor under the step's time."""

    most = 8

    def __init__(self, rate: float, cost: float, floor_s: float, steps: int):
        self._pace = (rate, cost, floor_s, steps)

    def stale(self, changes: int, running: int) -> bool:
        return changes > 0

    def pace(self, chunks, context_tokens):
        rate, cost, floor_s, steps = self._pace
        return Pace([rate] * len(chunks), [cost] * len(chunks), floor_s, steps)


@dataclass
class Piece:
    """A chunk of the slow replica."""

    chunk_id: str
    arrives_s: float
    context: int
    prefill: int
    tokens: int
    made: float = 0.0
    ends_s: float = inf
    preemptions: int = 0
    recomputed: int = 0
    mark: tuple[float, float] | None = None


@dataclass
class SlowReplica:
    """Token by token, and from the rules alone."""

    model: ReplicaModel
    rate: float = 1.0
    cost: float = 1.0
    floor_s: float = 0.0
    clock_s: float = 0.0
    written: float = 0.0
    running: list[Piece] = field(default_factory=list)
    queue: deque[Piece] = field(default_factory=deque)

    def context(self) -> float:
        return sum(piece.context + piece.made for piece in self.running)

    def run(self, pieces: list[Piece]) -> None:
        coming = deque(sorted(pieces, key=lambda piece: piece.arrives_s))
        while coming or self.running or self.queue:
            if not self.running and not self.queue:
                self.clock_s = max(self.clock_s, coming[0].arrives_s)
            self.between_steps(coming)
            if self.running:
                self.take_step()

    def between_steps(self, coming: deque[Piece]) -> None:
        for piece in [piece for piece in self.running if piece.made >= piece.tokens - 1e-9]:
            self.running.remove(piece)
            piece.ends_s = self.clock_s
        while coming and coming[0].arrives_s <= self.clock_s:
            self.queue.append(coming.popleft())
        if not self.preempt():
            self.admit(coming)

    def preempt(self) -> bool:
        capacity, preempted = self.model.kv_capacity_tokens, False
        while len(self.running) > 1 and self.context() + self.rate * len(self.running) > capacity:
            piece = self.running.pop()
            piece.made = float(int(piece.made + 1e-9))
            piece.mark = (self.written, max(0.0, capacity - self.context() - piece.context - piece.made))
            piece.preemptions += 1
            self.queue.appendleft(piece)
            preempted = True
        return preempted

    def admit(self, coming: deque[Piece]) -> None:
        stall_from_s = self.clock_s
        while self.queue and len(self.running) < self.model.max_running:
            piece = self.queue[0]
            need = self.context() + piece.context + piece.made + self.rate * (len(self.running) + 1)
            if self.running and need > self.model.kv_capacity_tokens:
                break
            self.queue.popleft()
            if piece.mark:
                kept = piece.context + piece.made - max(0.0, self.written - piece.mark[0] - piece.mark[1])
                piece.prefill = int(piece.context + piece.made) - max(0, int(kept))
                piece.recomputed += piece.prefill
            self.clock_s += piece.prefill / self.model.prefill_tokens_s
            self.written += piece.prefill
            self.running.append(piece)
        if self.clock_s > stall_from_s and coming and coming[0].arrives_s <= self.clock_s:
            self.between_steps(coming)  # who comes during a stall joins at its end

    def take_step(self) -> None:
        step = self.model.step
        plain_s = step.base_s + step.token_s * self.cost * len(self.running) + step.context_s * self.context()
        self.clock_s += max(self.floor_s, plain_s)
        for piece in self.running:
            piece.made += self.rate
        self.written += self.rate * len(self.running)


def model_of(random: Random, capacity: int) -> ReplicaModel:
    step = StepModel(random.uniform(0.001, 0.02), random.uniform(0, 1e-3), random.choice((0.0, 1e-7, 1e-5)))
    return ReplicaModel(step, capacity, random.choice((2, 5, 64)), random.choice((500.0, 1e4)), 1e5, 0.0)


def pieces_of(random: Random, most_tokens: int) -> list[Piece]:
    pieces = []
    for number in range(random.randint(1, 14)):
        prefill = random.choice((0, random.randint(1, 90)))
        context = max(prefill, random.randint(1, 90))
        arrives_s = random.choice((0.0, random.uniform(0, 6)))
        pieces.append(Piece(f"c{number}", arrives_s, context, prefill, random.randint(1, most_tokens)))
    return pieces


def fast(
    model: ReplicaModel, pieces: list[Piece], speculation=None, spans: list[Span] | None = None
) -> dict[str, tuple]:
    """End, preemptions and tokens computed again of each chunk, by the replica in closed form."""
    replica, found, turns = ModelledReplica(model, 0, speculation or PlainDecoding(), spans), {}, 0
    coming = deque(sorted(pieces, key=lambda piece: piece.arrives_s))
    while coming or replica.due_s < inf:
        turns += 1
        assert turns < 10_000, "it goes round in circles"
        if coming and coming[0].arrives_s <= replica.due_s:
            piece = coming.popleft()
            replica.submit(chunk_of(piece), piece.arrives_s)
            continue
        now = replica.due_s
        for chunk in replica.turn():
            sample = chunk.sample
            assert chunk.made == chunk.tokens
            found[chunk.chunk_id] = (now, sample.preemptions, sample.recomputed, chunk.verifications)
    assert not replica.running and not replica.waiting and replica.context == 0.0
    return found


def chunk_of(piece: Piece) -> SimulatedChunk:
    family = GroupProgress(WorkloadGroup(piece.chunk_id, piece.context, (piece.tokens,)), 0)
    chunk = SimulatedChunk(piece.chunk_id, SimulatedSample(family, 0, 0.0), piece.tokens, piece.tokens, (0, 0))
    chunk.prefill = piece.prefill
    return chunk


def slow(model: ReplicaModel, pieces: list[Piece], **pace) -> dict[str, tuple]:
    SlowReplica(model, **pace).run(pieces)
    return {piece.chunk_id: (piece.ends_s, piece.preemptions, piece.recomputed) for piece in pieces}


@pytest.mark.parametrize("capacity", [100_000, 420])
def test_the_closed_form_is_what_single_steps_come_to(capacity):
    """Batches with joins and prefill; with little KV, a good part of them is preempted."""
    preempted = recomputed = 0
    for seed in range(70):
        random = Random(seed)
        model, pieces = model_of(random, capacity), pieces_of(random, 300)
        quick, exact = fast(model, pieces), slow(model, pieces)
        assert {k: v[1:3] for k, v in quick.items()} == {k: v[1:] for k, v in exact.items()}, seed
        assert {k: v[0] for k, v in quick.items()} == pytest.approx({k: v[0] for k, v in exact.items()}, rel=1e-9)
        preempted += sum(piece.preemptions for piece in pieces)
        recomputed += sum(piece.recomputed for piece in pieces)
    assert (preempted > 50 and recomputed > 1_000) == (capacity < 1_000)


@pytest.mark.parametrize(("rate", "cost", "floor_s"), [(2.5, 4.0, 0.0), (1.0, 1.0, 0.05), (1.75, 9.0, 1e-4)])
def test_so_it_is_with_drafts_and_with_a_floor(rate, cost, floor_s):
    for seed in range(25):
        random = Random(seed)
        model, pieces = model_of(random, 100_000), pieces_of(random, 300)
        quick = fast(model, pieces, Steady(rate, cost, floor_s, random.randint(1, 40)))
        exact = slow(model, pieces, rate=rate, cost=cost, floor_s=floor_s)
        assert {k: v[0] for k, v in quick.items()} == pytest.approx({k: v[0] for k, v in exact.items()}, rel=1e-9)
        for piece in pieces:
            assert quick[piece.chunk_id][3] == -(-piece.tokens // rate), "whole engine steps, the last one in full"


def test_spans_hold_every_token_once_and_one_thing_at_a_time():
    for seed in range(30):
        random = Random(seed)
        model, pieces, spans = model_of(random, 420), pieces_of(random, 300), []
        found = fast(model, pieces, spans=spans)
        for piece in pieces:
            own = sorted((s for s in spans if s.sample_id == f"{piece.chunk_id}#0"), key=lambda s: s.begin_s)
            assert sum(span.tokens for span in own if span.role == "generate") == piece.tokens
            assert all(a.end_s <= b.begin_s + 1e-12 for a, b in pairwise(own))
            assert own[-1].end_s == found[piece.chunk_id][0]
            assert sum(span.verifications for span in own) == piece.tokens


def test_a_stopped_chunk_keeps_its_whole_tokens_and_leaves_the_others_alone():
    step = StepModel(0.01, 0.0, 0.0)
    replica = ModelledReplica(ReplicaModel(step, 10_000, 64, 1e4, 1e5, 0.0), 0, PlainDecoding())
    chunks = [chunk_of(Piece(f"c{i}", 0.0, 10, 0, 100)) for i in range(3)]
    replica.submit(chunks[0], 0.0)
    replica.submit(chunks[1], 0.0)
    assert replica.turn() == []
    replica.abort(chunks[0], 0.155)
    replica.submit(chunks[2], 0.155)
    assert replica.due_s == pytest.approx(0.16)
    assert replica.turn() == [chunks[0]] and chunks[0].made == 16
    assert replica.due_s == pytest.approx(1.0)
    assert replica.turn() == [chunks[1]] and chunks[1].made == 100
    replica.abort(chunks[2], 1.0)
    assert replica.turn() == [chunks[2]] and chunks[2].made == 84


def test_freed_kv_is_there_until_it_is_written_over():
    step = StepModel(0.01, 0.0, 0.0)
    replica = ModelledReplica(ReplicaModel(step, 1_000, 64, 1e9, 1e5, 0.0), 0, PlainDecoding())
    first, second = chunk_of(Piece("a", 0.0, 100, 100, 100)), chunk_of(Piece("b", 0.0, 50, 50, 900))
    replica.submit(first, 0.0)
    replica.submit(second, 0.0)
    replica.turn()
    assert replica.turn() == [first]
    now = replica.clock_s
    assert replica.cached(200, first.freed_kv, now) == 200
    free_before = 1_000 - 200 - 150  # never written
    assert replica.cached(200, first.freed_kv, now + 0.01 * free_before) == 200
    assert replica.cached(200, first.freed_kv, now + 0.01 * (free_before + 80)) == 120
    assert replica.cached(200, first.freed_kv, now + 0.01 * 800) == 50, "as many as b leaves room for"
    assert ModelledReplica(replica.model, 1, PlainDecoding()).cached(200, first.freed_kv, now) == 0


def test_what_joins_writes_over_freed_kv_too():
    step = StepModel(0.01, 0.0, 0.0)
    replica = ModelledReplica(ReplicaModel(step, 400, 64, 1e9, 1e5, 0.0), 0, PlainDecoding())
    first, second = chunk_of(Piece("a", 0.0, 100, 100, 100)), chunk_of(Piece("b", 0.0, 250, 250, 50))
    replica.submit(first, 0.0)
    replica.turn()
    assert replica.turn() == [first]
    replica.submit(second, replica.clock_s)
    replica.turn()
    assert replica.cached(200, first.freed_kv, replica.clock_s) == 150, "250 written: 200 that were free, 50 of these"
