"""The continuous batch of a pipeline's worker, which advances in closed form from one change of the batch to the next.

A step computes T tokens over C tokens of context and makes R tokens. k steps take k seconds(T, C) + context_s R k^2 /
2; k need not be whole, so draft tokens count by their mean. Answers are admitted first come, first served while the KV
of their whole length fits, as if lengths were known, so no answer is preempted. An answer that joins with tokens to
compute delays all others. Invariant: the tokens made are those by which answers grew. Driven by `PipelineHost`.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from tailrace.lab.simulator.types import ReplicaModel


class Drafts(NamedTuple):
    """Drafts from history. A step makes `tokens_per_step` tokens (acceptance length) of an answer that has them, and
    computes `drafted` tokens more, while at most `most_running` answers run.
    """

    tokens_per_step: float
    drafted: float
    most_running: int


NO_DRAFTS = Drafts(1.0, 0.0, 0)


@dataclass(eq=False, slots=True)
class BatchAnswer:
    """One answer of `length` tokens, in ranking group `rank` of `step`. `drafted`: there is history to draft from.

    `stop`: number of tokens at which the host must act: at the end of the answer, or where it becomes an outlier.
    `lane`: number of its lane, None unless the answer runs. `origin`: see Lane. `entry`: entry of its next stop in the
    lane. `generated`: number of tokens at its last admission or stop.
    """

    group_id: str
    prompt_tokens: int
    length: int
    drafted: bool
    step: int
    rank: int
    stop: int
    generated: float = 0.0
    worker: int = -1
    lane: int | None = None
    origin: float = 0.0
    entry: tuple | None = None


class Lane:
    """Running answers of one pace: each of them has made `at` - `origin` tokens."""

    def __init__(self) -> None:
        self.at = 0.0
        self.running = 0
        self.stops: list[tuple[float, int, BatchAnswer]] = []

    def next_stop(self) -> float:
        """Returns the value of `at` at the next stop, or infinity. Removes entries of answers that have left or have
        another stop by now.
        """
        while self.stops and self.stops[0] is not self.stops[0][2].entry:
            heappop(self.stops)
        return self.stops[0][0] if self.stops else inf


class AnswerBatch:
    """Running and waiting answers of a worker at `clock_s`. Answers without drafts run in lane 0, others in lane 1."""

    def __init__(self, model: ReplicaModel, drafts: Drafts):
        self.model, self.drafts = model, drafts
        self.clock_s, self.made = 0.0, 0.0
        self.waiting: deque[BatchAnswer] = deque()
        self._lanes = (Lane(), Lane())
        self.running = 0
        self._context, self._reserved, self._serial = 0.0, 0, 0
        self._steps_left = inf  # steps to the next stop, set by `due_s`
        self._prompts: set[str] = set()

    def __len__(self) -> int:
        return self.running + len(self.waiting)

    def start(self, now: float) -> None:
        """Begins a new training step on an idle worker, whose prompts are then computed again."""
        self.clock_s = max(self.clock_s, now)
        self._prompts.clear()

    def submit(self, answers: list[BatchAnswer], now: float) -> None:
        self.advance(now)
        self.waiting.extend(answers)
        self._admit()

    def due_s(self) -> float:
        """Returns the time in seconds at which the next answer stops; infinity while none runs."""
        self._steps_left = self._steps_to_stop()
        return self.clock_s + self._seconds(self._steps_left) if self.running else inf

    def turn(self) -> list[BatchAnswer]:
        """Advances to the time that `due_s` has returned last. Returns the answers that stop there, in the order in
        which their stops were set. They still run.
        """
        self._advance_steps(self._steps_left)
        stopped = []
        for lane in self._lanes:
            while lane.next_stop() <= lane.at * (1 + 1e-12) + 1e-9:
                _, serial, answer = heappop(lane.stops)
                answer.generated = float(answer.stop)
                stopped.append((serial, answer))
        return [answer for _, answer in sorted(stopped, key=lambda pair: pair[0])]

    def resume(self, answer: BatchAnswer) -> None:
        """Lets an answer continue to its next stop, which must lie ahead."""
        self._push(answer)

    def leave(self, answer: BatchAnswer) -> None:
        """Removes an answer that has ended or moves away, and admits waiting answers."""
        lane = self._lanes[answer.lane]
        answer.generated = float(answer.stop) if answer.generated == answer.stop else lane.at - answer.origin
        answer.lane = answer.entry = None
        lane.running -= 1
        self.running -= 1
        self._context -= answer.prompt_tokens + answer.generated
        self._reserved -= answer.prompt_tokens + answer.length
        if not self.running:
            self._context = 0.0  # removes rests of added fractions
        self._admit()

    def advance(self, now: float) -> None:
        """Advances to `now`, before which no answer may stop. Changes nothing if `now` lies within a computation of
        context.
        """
        spent_s = now - self.clock_s
        if spent_s > 0 and self.running:
            _, first_s, growth_s = self._pace()
            self._advance_steps(2 * spent_s / (first_s + sqrt(first_s**2 + 2 * growth_s * spent_s)))
        self.clock_s = max(self.clock_s, now)

    def _admit(self) -> None:
        model = self.model
        while self.waiting and self.running < model.max_running:
            answer = self.waiting[0]
            need = answer.prompt_tokens + answer.length
            if self.running and self._reserved + need > model.kv_capacity_tokens:
                break
            self.waiting.popleft()
            known = answer.group_id in self._prompts and not answer.generated
            self.clock_s += 0.0 if known else (answer.prompt_tokens + answer.generated) / model.prefill_tokens_s
            self._prompts.add(answer.group_id)
            self._reserved += need
            self._context += answer.prompt_tokens + answer.generated
            answer.lane = int(answer.drafted)
            answer.origin = self._lanes[answer.lane].at - answer.generated
            self._lanes[answer.lane].running += 1
            self.running += 1
            self._push(answer)

    def _push(self, answer: BatchAnswer) -> None:
        self._serial += 1
        answer.entry = (answer.origin + answer.stop, self._serial, answer)
        heappush(self._lanes[answer.lane].stops, answer.entry)

    def _pace(self) -> tuple[float, float, float]:
        """Returns the tokens that an answer with drafts makes in a step, the seconds of the next step, and the seconds
        by which each step is longer than the one before.
        """
        plain, drafted = self._lanes[0].running, self._lanes[1].running
        rate, drafts = self.drafts[:2] if self.running <= self.drafts.most_running else (1.0, 0.0)
        step = self.model.step
        first_s = step.seconds(plain + drafted * (1 + drafts), self._context)
        return rate, first_s, step.context_s * (plain + drafted * rate)

    def _steps_to_stop(self) -> float:
        plain, drafted = self._lanes
        steps = min(plain.next_stop() - plain.at, (drafted.next_stop() - drafted.at) / self._pace()[0])
        return max(0.0, steps)

    def _seconds(self, steps: float) -> float:
        _, first_s, growth_s = self._pace()
        return steps * first_s + growth_s * steps**2 / 2

    def _advance_steps(self, steps: float) -> None:
        rate, first_s, growth_s = self._pace()
        self.clock_s += steps * first_s + growth_s * steps**2 / 2
        for lane, tokens in ((self._lanes[0], steps), (self._lanes[1], steps * rate)):
            lane.at += tokens
            self.made += tokens * lane.running
            self._context += tokens * lane.running


def expected_s(lengths: np.ndarray, prompt_tokens: np.ndarray, model: ReplicaModel, drafts: Drafts) -> float:
    """Returns the seconds that a worker needs for answers of these lengths, all with drafts: a closed form, a little
    low.

    The number of steps is the maximum of three: the longest answer's, that in which all answers fit into the KV memory,
    and that in which at most max_running of them run. Each step counts as an average one.
    """
    ordered = np.sort(lengths).astype(float)
    undrafted = ordered[-drafts.most_running - 1] if len(ordered) > drafts.most_running else 0.0
    longest = undrafted + (ordered[-1] - undrafted) / drafts.tokens_per_step
    held = float((lengths * (prompt_tokens + lengths)).sum()) / model.kv_capacity_tokens
    tokens = float(lengths.sum())
    steps = max(longest, held, tokens / model.max_running)
    context = float((lengths * (prompt_tokens + lengths / 2)).sum())
    return steps * model.step.seconds(tokens / steps, context / steps)
