"""The proposals of vLLM's own drafter (MTP, EAGLE, a draft model, n-grams), and the steps in which it makes them.

vLLM proposes at the end of a step, for all requests, in the same model runner. Its proposals are one more source of
drafts, with a measured acceptance. The drafter costs time in the step, so it runs while its drafts are worth its
measured seconds; a step with it now and then shows whether that has changed.
On vLLM's second runner proposals stay on the device, so steps can run ahead of them, see deployments.engine.step_pace.
They do where whole proposals of all samples are worth about as much as what the policy would choose from all sources;
all other steps with it wait for their tokens.
Invariant: its seconds are the difference of two steps of one size, one with it and the next without. Owned by
`EngineDrafts`, on the engine's thread.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np

from tailrace.deployments.draft_index.proposal import accepted_tokens
from tailrace.deployments.drafting.drafted_tokens import DraftedTokens
from tailrace.deployments.drafting.proposal_batch import ProposalBatch
from tailrace.deployments.messages.context import Source
from tailrace.deployments.messages.drafts import ON_DEVICE
from tailrace.policies.models.acceptance_estimator import AcceptanceEstimator
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import chance, count_tested
from tailrace.policies.protocol.step_cost import StepCost

NO_TOKEN = -2
"""No token, where a proposal has ended."""

FIRST_MEASURE, MEASURE, LOOK, TRIAL = 8, 64, 8, 256
"""Steps with the drafter before the first one without it, and between two of these, which measure its seconds; steps
without it between two looks whether it would pay; and before a trial, which tests its proposals again.
"""

WEIGHT, LIKE, FADE = 0.25, 0.1, 0.9
"""Weight of a new measurement of its seconds; maximum difference between the tokens of the two compared steps; weight
of what it has brought until now beside what it brings in the next step.
"""

WAITING_COSTS = 0.1
"""Share of a step's seconds that a step which waits is assumed to add: the host's work, which is not hidden then."""


class VllmProposals:
    """`length`: tokens of a proposal, 0 if vLLM has no drafter. `switch`: sets how many tokens vLLM proposes, from the
    next step on. `ahead`: steps may run ahead.
    """

    def __init__(self, length: int = 0, switch: Callable[[int], None] = lambda _: None, ahead: bool = False):
        self._length, self._switch, self._ahead = length, switch, ahead
        self.acceptance = AcceptanceEstimator()  # its owner sets its own
        self.on = self.ran = False  # in the next step; in the step that has just ended
        self.trial = False
        self.suffices = False  # in the next steps nothing else drafts, and its proposals are verified whole
        self._steps, self._until_measure, self._until_look = 0, FIRST_MEASURE, 0
        self._seconds = self._worth = 0.0  # of it in a step; tokens a second that it brings, a faded sum over steps
        self._before: tuple[float, int, int] | None = None  # seconds, samples and tokens of the step before, if with it
        if length:
            switch(0)

    @property
    def methods(self) -> tuple[str, ...]:
        """Returns the draft methods that it adds."""
        return (DraftMethod.VLLM,) if self._length else ()

    @property
    def must_wait(self) -> bool:
        """Returns whether the next step waits, although no draft is set yet."""
        return self.on and not self.suffices

    def step(self, took_s: float, samples: int, tokens: int, ran: bool | None) -> float:
        """Records a step that verified this many tokens. Returns its seconds without those of the drafter. `ran`:
        whether that proposed in this step; None: as it was set last.
        """
        self.ran = self.on if ran is None else ran
        self._steps += 1
        before, self._before = self._before, (took_s, samples, tokens) if self.ran else None
        if self.ran:
            return max(0.0, took_s - self._seconds)
        if before is not None and before[1] == samples and abs(before[2] - tokens) <= max(2.0, LIKE * before[2]):
            found = max(0.0, before[0] - took_s)
            self._seconds += (WEIGHT if self._seconds else 1.0) * (found - self._seconds)
        return took_s

    def count(self, drafted: DraftedTokens, tokens: list[int], sums: list[int]) -> None:
        """Adds the right and the tested tokens of a chunk's proposal, verified or not, and 1 verification to the sums;
        nothing if the host cannot know. `tokens`: those that the step has emitted.
        """
        proposed, drafted.proposed = drafted.proposed, []
        if proposed[0] != ON_DEVICE:
            right, seen = accepted_tokens(proposed, tokens), min(len(proposed), len(tokens))
        elif drafted.draft and drafted.draft[0] == ON_DEVICE:
            right, seen = min(len(drafted.draft), len(tokens) - 1), len(drafted.draft)
        else:
            return
        tested = count_tested(right, seen)
        drafted.proposed_right += right
        drafted.proposed_tested += tested
        for place, number in enumerate((right, tested, 1)):
            sums[place] += number

    def take(self, running: Sequence[DraftedTokens], ahead: bool) -> None:
        """Takes the proposals of the step that has ended off the requests of these chunks. `ahead`: a step in flight
        verifies them.
        """
        for drafted in running if self._length else ():
            if ahead:
                drafted.proposed = [ON_DEVICE] * self._length if self.ran else []
            else:
                drafted.proposed = list(drafted.request.spec_token_ids[: self._length]) if self.ran else []
                drafted.request.spec_token_ids = []

    def join(self, batch: ProposalBatch, running: Sequence[DraftedTokens], guess: bool = False) -> None:
        """Joins the proposals of these chunks with those in the batch, row by row. `guess`: as if it had run."""
        like = [ON_DEVICE] * self._length if guess else None
        found = [(row, like or drafted.proposed) for row, drafted in enumerate(running if self._length else ())
                 if (like or drafted.proposed) and drafted.chunk.draft.method in (None, DraftMethod.VLLM)]  # fmt: skip
        if not found:
            return
        rows, proposed = zip(*found, strict=True)
        tokens = np.array([each + [NO_TOKEN] * (self._length - len(each)) for each in proposed], np.int32)
        chances = self._chances([running[row] for row in rows])
        right = np.where(tokens == NO_TOKEN, 0, chances[:, None])
        batch.join(np.array(rows), tokens, right.astype(np.float32), Source.VLLM)

    def _chances(self, running: Sequence[DraftedTokens]) -> np.ndarray:
        """Returns f64[n]: how likely a token of each chunk's proposal is right after right ones."""
        usual = self.acceptance.chance(DraftMethod.VLLM)
        return np.array([chance(one.proposed_right, one.proposed_tested, usual) for one in running])

    def weigh(self, running: Sequence[DraftedTokens], batch: ProposalBatch, budgets, cost, decide, ahead: bool):
        """Decides whether it runs in the next step. Returns what to verify in this one: a batch, and budgets i32[n].

        `budgets`: those of the batch by the policy, which `decide` asks for another batch. `cost`: StepCost, or None if
        the policy drafts whatever it costs. `ahead`: this step is in flight, so nothing of it changes.
        """
        if self.ran:
            if self.trial:
                tested = (batch.sources[:, 0] == Source.VLLM) & (batch.lengths > 0)
                budgets = np.where(tested, np.maximum(budgets, 1), budgets)
            self._decide(running, batch, budgets, cost)
        elif self._length and self._looks(cost is not None):
            guess = deepcopy(batch)
            self.join(guess, running, guess=True)
            self._decide(running, guess, decide(guess)[0], cost)
        if ahead or not self.suffices:
            return batch, budgets
        self.join(own := ProposalBatch(len(running), batch.right.shape[1]), running)
        decide(own)  # which cuts it to the rooms
        return own, own.lengths

    def _looks(self, weighed: bool) -> bool:
        """Returns whether to see if it would pay, while it does not run."""
        self._until_look -= 1
        if self.on or (weighed and self._until_look > 0):
            return False
        self._until_look = LOOK
        return True

    def _decide(
        self, running: Sequence[DraftedTokens], batch: ProposalBatch, budgets: np.ndarray, cost: StepCost | None
    ) -> None:
        if self.trial and not self.ran:
            return  # its step is still to come
        self.trial = self.suffices = False
        if self._pays(batch, budgets, cost):
            measures = cost is not None and self.on and self._steps >= self._until_measure
            self._set(not measures)
            if measures:
                self._until_measure, self._until_look = MEASURE, 0
            self.suffices = self._ahead and self._is_enough(running, batch, budgets, cost)
        else:
            self.trial = not self.on and self._steps >= TRIAL
            if self.trial:
                self._worth = 0.0  # what it brought is forgotten; until then a step in flight may still have it
            self._set(self.trial)

    @staticmethod
    def _gains(batch: ProposalBatch, budgets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each row's expected right tokens f64[n], and bool[n]: whether vLLM's drafter made some of them."""
        inside = np.arange(batch.right.shape[1]) < budgets[:, None]
        gains = np.where(inside, np.cumprod(batch.right, axis=1), 0.0).sum(axis=1)
        return gains, (inside & (batch.sources == Source.VLLM)).any(axis=1)

    def _pays(self, batch: ProposalBatch, budgets: np.ndarray, cost: StepCost | None) -> bool:
        """Returns whether its drafts are worth its seconds: those of one step, before it runs; then the mean of the
        last steps, since n-grams have proposals in some steps alone.
        """
        if cost is None:
            return True
        gains, of_vllm = self._gains(batch, budgets)
        count, others = len(budgets), ~of_vllm
        without_s = float(cost.at(count + budgets[others].sum()))
        worth = self._rate(gains, budgets.sum(), cost) - (count + gains[others].sum()) / without_s
        self._worth = FADE * self._worth + worth if self.ran else worth
        return self._worth >= 0 if self.ran else self._worth > 0

    def _rate(self, gains: np.ndarray, drafts: int, cost: StepCost) -> float:
        """Returns the expected tokens a second of steps in which it runs. gains f64[n]: right tokens of each chunk."""
        return (len(gains) + gains.sum()) / (float(cost.at(len(gains) + drafts)) + self._seconds)

    def _is_enough(
        self, running: Sequence[DraftedTokens], batch: ProposalBatch, budgets: np.ndarray, cost: StepCost | None
    ) -> bool:
        """Returns whether whole proposals of all chunks, in steps ahead, are worth as much as the budgets in steps that
        wait. A policy that does not weigh costs gets what it chose.
        """
        if batch.right.shape[1] < self._length:
            return False
        if cost is None:
            inside = np.arange(batch.right.shape[1]) < budgets[:, None]
            others = inside & (batch.sources != Source.VLLM)
            return not others.any() and bool((budgets >= np.minimum(batch.lengths, self._length)).all())
        chosen = self._rate(self._gains(batch, budgets)[0], budgets.sum(), cost)
        gains = (self._chances(running)[:, None] ** np.arange(1, self._length + 1)).sum(axis=1)
        return self._rate(gains, len(gains) * self._length, cost) >= (1 - WAITING_COSTS) * chosen

    def rest(self) -> None:
        """Lets it propose nothing in the next step, since nothing drafts."""
        self.trial = self.suffices = False
        self._set(False)
        self._until_look = 0

    def _set(self, on: bool) -> None:
        if on != self.on:
            self.on, self._steps = on, 0
            self._until_look = LOOK
            self._switch(self._length if on else 0)
