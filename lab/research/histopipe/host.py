"""The pipeline's clock: workers go from step to step by themselves, training follows, outliers move (RhymeRL 6).

A worker begins step k + 1 once it has ended its part of step k and training on step k - 1 has ended. With `barrier`
training on step k must have ended. Training takes one step after the other, each as soon as its last answer has ended.
Decisions are those of policy.py. An answer that moves keeps its tokens, and its context is computed again. Invariants:
no token is lost or made twice, no worker works on two steps at once, the weights of a step lack at most one step of
training. Called by `systems`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from tailrace.lab.research.histopipe.batch import AnswerBatch, BatchAnswer, Drafts, expected_s
from tailrace.lab.research.histopipe.policy import HistoPipeline, Prompt, RankingGroup, in_order
from tailrace.lab.simulator.types import Cluster, WorkloadGroup


class WorkerTurn(NamedTuple):
    """A worker's part in a step. `version`: number of training steps in the weights that it loaded."""

    worker: int
    step: int
    begin_s: float
    end_s: float
    version: int


class Times(NamedTuple):
    """Seconds of training on a step, and of loading its weights into a worker."""

    train_s: float
    weights_s: float


@dataclass(slots=True)
class PipelineStep:
    """A planned step. By rank of ranking group: `samples`, number of answers; `unfinished`, those that have not ended;
    `outliers`. By worker: `rank_of`; `answers`, those it begins with. `open`: number of all answers that have not
    ended.
    """

    samples: list[int]
    unfinished: list[int]
    outliers: list[list[BatchAnswer]]
    rank_of: dict[int, int]
    answers: dict[int, list[BatchAnswer]]
    open: int
    last_end_s: float = 0.0


class PipelineHost:
    """`policy`: None for prompts in the order given. The record of a run is `turns`, `ended`, `trained_s` and the
    moves.
    """

    def __init__(
        self, steps: Sequence[tuple[WorkloadGroup, ...]], cluster: Cluster, policy: HistoPipeline | None, times: Times,
        *, barrier: bool, migrate: bool, drafts: Drafts,
    ):  # fmt: skip
        if not steps or not all(steps):
            raise ValueError("a pipeline needs steps, and each step prompts")
        self._source, self._cluster, self._policy, self._times = steps, cluster, policy, times
        self._lag = 1 if barrier else 2
        self._migrate, self._drafts = migrate, drafts
        self.batches = [AnswerBatch(cluster.replica, drafts) for _ in range(cluster.replicas)]
        self.trained_s: list[float] = []  # when training on each step has ended
        self.turns: list[WorkerTurn] = []
        self.ended: list[BatchAnswer] = []
        self.moved_within = self.moved_on = 0
        self._steps: list[PipelineStep] = []
        self._at = [-1] * cluster.replicas  # the step each worker is in, or was in last
        self._begun: list[tuple[float, int] | None] = [None] * cluster.replicas  # begin in seconds, version; None: idle
        self._due: list[float | None] = [None] * cluster.replicas
        self._events: list[tuple[float, int]] = []
        self._touched: set[int] = set()

    def run(self) -> None:
        for worker in range(len(self.batches)):
            self._enter_next(worker)
        while self._events:
            now, worker = heappop(self._events)
            if now != self._due[worker]:
                continue  # the worker's time has been set again since
            self._touched = {worker}
            if self._begun[worker] is None:
                self._begin(worker, now)
            else:
                stopped = self.batches[worker].turn()
                for answer in stopped:
                    self._stopped(worker, answer, now)
                for number, rank in dict.fromkeys((answer.step, answer.rank) for answer in stopped):
                    self._move_outliers(self._steps[number], rank, now)
            for each in sorted(self._touched):
                self._reschedule(each)

    # ---- a worker's way through the steps ------------------------------------------------------------

    def _enter_next(self, worker: int) -> None:
        """Sets the time at which an idle worker begins its next step. Does nothing if there is no next step, or if the
        end of the training that it needs is not known yet.
        """
        step = self._at[worker] + 1
        needs = step - self._lag
        if step < len(self._source) and needs < len(self.trained_s):
            self._at[worker] = step
            self._set_due(worker, max(self.batches[worker].clock_s, self.trained_s[needs] if needs >= 0 else 0.0))

    def _begin(self, worker: int, now: float) -> None:
        number = self._at[worker]
        self._begun[worker] = (now, sum(trained_s <= now for trained_s in self.trained_s))
        batch = self.batches[worker]
        batch.start(now + (self._times.weights_s if number else 0.0))
        batch.submit(self._planned(number).answers.pop(worker), batch.clock_s)

    def _reschedule(self, worker: int) -> None:
        """Sets the time at which an answer of a worker stops next. A worker with no answer left ends its step."""
        batch = self.batches[worker]
        if len(batch):
            self._set_due(worker, batch.due_s())
            return
        begin_s, version = self._begun[worker]
        self._begun[worker] = self._due[worker] = None
        self.turns.append(WorkerTurn(worker, self._at[worker], begin_s, batch.clock_s, version))
        self._enter_next(worker)

    def _set_due(self, worker: int, at_s: float) -> None:
        self._due[worker] = at_s
        heappush(self._events, (at_s, worker))

    # ---- plans ---------------------------------------------------------------------------------------

    def _planned(self, number: int) -> PipelineStep:
        """Returns the plan of a step. Steps are planned in turn, each when it is first needed."""
        while len(self._steps) <= number:
            self._steps.append(self._plan(len(self._steps)))
        return self._steps[number]

    def _plan(self, number: int) -> PipelineStep:
        groups = {group.group_id: group for group in self._source[number]}
        prompts = [Prompt(group.group_id, group.past_lengths) for group in self._source[number]]
        ranking = in_order(prompts, len(self.batches))
        if self._policy is not None:
            ranking = self._policy.assign(
                prompts, len(self.batches), number, lambda run, k: self._group_s(run, k, groups), self._times.train_s
            )
        rank_of, answers = {}, {}
        for rank, ranked in enumerate(ranking):
            for worker, share in zip(ranked.workers, ranked.shares, strict=True):
                rank_of[worker] = rank
                answers[worker] = [
                    answer for group_id in share for answer in self._answers(groups[group_id], number, rank, ranked)
                ]
        samples = [sum(len(answers[worker]) for worker in ranked.workers) for ranked in ranking]
        return PipelineStep(
            samples=samples,
            unfinished=list(samples),
            outliers=[[] for _ in ranking],
            rank_of=rank_of,
            answers=answers,
            open=sum(samples),
        )

    def _answers(self, group: WorkloadGroup, step: int, rank: int, ranked: RankingGroup) -> list[BatchAnswer]:
        may_move = self._migrate and ranked.outlier_tokens is not None
        limit = int(ranked.outlier_tokens) + 1 if may_move else max(group.lengths)
        drafted = bool(group.past_lengths)
        return [
            BatchAnswer(
                group_id=group.group_id,
                prompt_tokens=group.prompt_tokens,
                length=length,
                drafted=drafted,
                step=step,
                rank=rank,
                stop=min(length, limit),
            )
            for length in group.lengths
        ]

    def _group_s(self, run: Sequence[Prompt], workers: int, groups: dict[str, WorkloadGroup]) -> float:
        """Returns the expected seconds of a ranking group on so many workers: those of its last worker, which has the
        longest prompts, by the lengths of their last epoch.
        """
        share = [prompt for prompt in run[min(workers, len(run)) - 1 :: workers] if prompt.past]
        lengths = np.array([tokens for prompt in share for tokens in prompt.past[0]])
        prompts = np.repeat(
            [groups[prompt.prompt_id].prompt_tokens for prompt in share], [len(p.past[0]) for p in share]
        )
        return expected_s(lengths, prompts, self._cluster.replica, self._drafts) if share else 0.0

    # ---- answers -------------------------------------------------------------------------------------

    def _stopped(self, worker: int, answer: BatchAnswer, now: float) -> None:
        step, batch = self._steps[answer.step], self.batches[worker]
        if answer.stop < answer.length:
            answer.stop, answer.worker = answer.length, worker
            batch.resume(answer)
            step.outliers[answer.rank].append(answer)
        else:
            batch.leave(answer)
            self.ended.append(answer)
            step.last_end_s = now
            self._close(answer)

    def _close(self, answer: BatchAnswer) -> None:
        """Counts an answer as ended for its step. After the last answer of a step the end of training on that step is
        known, and idle workers may continue.
        """
        step = self._steps[answer.step]
        step.unfinished[answer.rank] -= 1
        step.open -= 1
        while len(self.trained_s) < len(self._steps) and not self._steps[len(self.trained_s)].open:
            before_s = self.trained_s[-1] if self.trained_s else 0.0
            ended_s = self._steps[len(self.trained_s)].last_end_s
            self.trained_s.append(max(before_s, ended_s) + self._times.train_s)
            for worker, begun in enumerate(self._begun):
                if begun is None and self._due[worker] is None:
                    self._enter_next(worker)

    def _move_outliers(self, step: PipelineStep, rank: int, now: float) -> None:
        if not step.outliers[rank]:
            return
        verdict = self._policy.migration(rank, len(step.samples), step.unfinished[rank], step.samples[rank])
        if verdict == "stay":
            return
        running = [answer for answer in step.outliers[rank] if answer.lane is not None]
        move = self._move_within if verdict == "within" else self._move_on
        step.outliers[rank] = [answer for answer in running if not move(answer, now)]

    def _move_within(self, answer: BatchAnswer, now: float) -> bool:
        """Moves an outlier to the least busy worker of a longer ranking group that still works on the same step.
        Returns whether there is one.
        """
        ranks = self._steps[answer.step].rank_of
        at_work = [
            worker
            for worker, begun in enumerate(self._begun)
            if begun and self._at[worker] == answer.step and ranks[worker] > answer.rank and len(self.batches[worker])
        ]
        if not at_work:
            return False
        self._take(answer, now)
        self._give(answer, min(at_work, key=lambda worker: (len(self.batches[worker]), worker)), now)
        self.moved_within += 1
        return True

    def _move_on(self, answer: BatchAnswer, now: float) -> bool:
        """Moves an outlier to the next step: to a worker of the step's longest ranking group that has not ended the
        step. Returns whether there is a next step.

        The answer counts for the next step, so its first tokens are of weights that lack one training more than the
        step's.
        """
        number = answer.step + 1
        if number == len(self._source):
            return False
        after = self._planned(number)
        ahead = [
            worker
            for worker, begun in enumerate(self._begun)
            if self._at[worker] < number or worker in after.answers or (self._at[worker] == number and begun)
        ]
        target = max(ahead, key=lambda worker: (after.rank_of[worker], -len(after.answers.get(worker, ())), -worker))
        self._take(answer, now)
        rank = after.rank_of[target]
        after.unfinished[rank] += 1
        after.open += 1
        self._steps[answer.step].last_end_s = now
        self._close(answer)
        answer.step, answer.rank = number, rank
        if target in after.answers:
            after.answers[target].append(answer)
        else:
            self._give(answer, target, now)
        self.moved_on += 1
        return True

    def _take(self, answer: BatchAnswer, now: float) -> None:
        batch = self.batches[answer.worker]
        batch.advance(now)
        batch.leave(answer)
        self._touched.add(answer.worker)

    def _give(self, answer: BatchAnswer, worker: int, now: float) -> None:
        self.batches[worker].submit([answer], now)
        answer.worker = worker
        self._touched.add(worker)
