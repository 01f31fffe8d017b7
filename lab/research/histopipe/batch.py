"""One pipeline worker's continuous batch, which advances in closed form from one change of the batch to the next.

With T tokens computed and C of context in a step and R tokens made by it, k steps take k seconds(T, C) +
context_s R k^2 / 2; k need not be whole, so draft tokens count by their mean. Answers are admitted first come, first
served while the KV of their whole length fits, as if lengths were known: no preemption. Who joins with tokens to
compute holds up all. Invariant: tokens made are those by which answers grew. Driven by `pipeline`.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from tailrace.lab.simulator.types import ReplicaModel


class Drafts(NamedTuple):
    """Drafts from history: an answer with any makes `tokens_per_step` (acceptance length) and computes `drafted` tokens
    more per step, while at most `most_running` answers run."""

    tokens_per_step: float
    drafted: float
    most_running: int


NO_DRAFTS = Drafts(1.0, 0.0, 0)


@dataclass(eq=False, slots=True)
class BatchAnswer:
    """One answer of `length` tokens, in ranking group `rank` of `step`. `drafted`: there is history to draft from.

    `stop`: tokens at which it wants attention: its end, or where it becomes an outlier. `lane`: None unless it runs;
    `entry`: of its next stop; `generated` is as of its last admission or stop.
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
    """Answers of one pace: each has made `at` - origin tokens."""

    def __init__(self) -> None:
        self.at = 0.0
        self.running = 0
        self.stops: list[tuple[float, int, BatchAnswer]] = []

    def next_stop(self) -> float:
        """Dead entries, of answers that have left or have another stop by now, go."""
        while self.stops and self.stops[0] is not self.stops[0][2].entry:
            heappop(self.stops)
        return self.stops[0][0] if self.stops else inf


class AnswerBatch:
    """`clock_s`: when everything is as it says. Answers without drafts run in lane 0, others in lane 1."""

    def __init__(self, model: ReplicaModel, drafts: Drafts):
        self.model, self.drafts = model, drafts
        self.clock_s, self.made = 0.0, 0.0
        self.waiting: deque[BatchAnswer] = deque()
        self._lanes = (Lane(), Lane())
        self.running = 0
        self._context, self._reserved, self._serial = 0.0, 0, 0
        self._steps_left = inf  # to the next stop, as of `due_s`
        self._prompts: set[str] = set()

    def __len__(self) -> int:
        return self.running + len(self.waiting)

    def start(self, now: float) -> None:
        """A new step of training begins on an idle worker."""
        self.clock_s = max(self.clock_s, now)
        self._prompts.clear()

    def submit(self, answers: list[BatchAnswer], now: float) -> None:
        self.advance(now)
        self.waiting.extend(answers)
        self._admit()

    def due_s(self) -> float:
        """When the next answer stops; infinite while none runs."""
        self._steps_left = self._steps_to_stop()
        return self.clock_s + self._seconds(self._steps_left) if self.running else inf

    def turn(self) -> list[BatchAnswer]:
        """Advance to what `due_s` has just told; the answers that stop there, as they were admitted. They still run."""
        self._advance_steps(self._steps_left)
        stopped = []
        for lane in self._lanes:
            while lane.next_stop() <= lane.at * (1 + 1e-12) + 1e-9:
                _, serial, answer = heappop(lane.stops)
                answer.generated = float(answer.stop)
                stopped.append((serial, answer))
        return [answer for _, answer in sorted(stopped, key=lambda pair: pair[0])]

    def resume(self, answer: BatchAnswer) -> None:
        """It continues to its next stop, which must lie ahead."""
        self._push(answer)

    def leave(self, answer: BatchAnswer) -> None:
        """It has ended or moves away; its room goes to those that wait."""
        lane = self._lanes[answer.lane]
        answer.generated = float(answer.stop) if answer.generated == answer.stop else lane.at - answer.origin
        answer.lane = answer.entry = None
        lane.running -= 1
        self.running -= 1
        self._context -= answer.prompt_tokens + answer.generated
        self._reserved -= answer.prompt_tokens + answer.length
        if not self.running:
            self._context = 0.0  # sheds rounding
        self._admit()

    def advance(self, now: float) -> None:
        """Up to `now`, at which no answer stops; nothing if that lies within a computation of context."""
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
        """Tokens that an answer with drafts makes in a step, seconds of the next step, and how much longer each one is
        than the one before."""
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
    """Seconds in which a worker is through with answers of these lengths, all with drafts: a closed form, a little low.

    Steps are the most of the longest answer's, those in which all fit into the KV memory, and those in which no more
    than max_running run; each is taken for an average one.
    """
    ordered = np.sort(lengths).astype(float)
    undrafted = ordered[-drafts.most_running - 1] if len(ordered) > drafts.most_running else 0.0
    longest = undrafted + (ordered[-1] - undrafted) / drafts.tokens_per_step
    held = float((lengths * (prompt_tokens + lengths)).sum()) / model.kv_capacity_tokens
    tokens = float(lengths.sum())
    steps = max(longest, held, tokens / model.max_running)
    context = float((lengths * (prompt_tokens + lengths / 2)).sum())
    return steps * model.step.seconds(tokens / steps, context / steps)
