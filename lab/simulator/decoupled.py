"""Draft models on replicas: drafting and verifying in turn (coupled), or at once on separate GPUs (SpecActor 4.1).

All samples of a replica share its rounds. A round verifies V seconds; the draft model of each method takes its longest
window times D(b). If no sample drafts ahead, drafts come first and the times add; else both run in parallel and the
longer counts. A sample that drafts ahead has tau_exact tokens a round, and skips the round after a wrong window. One
that waits, beside others that do not, is verified every second round, and drafted in the other. Alone, a sample that
drafts ahead waits for nobody (`policies.models.spec_cost_model`). Invariant: chances are a function of (seed, method,
sample), and methods differ by sample; only the replica knows them. Called by `Replica`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from statistics import NormalDist
from typing import NamedTuple

from tailrace.lab.simulator.acceptance import ModelledMethod
from tailrace.lab.simulator.chunks import SimulatedChunk, SimulatedSample
from tailrace.lab.simulator.speculation import CHANGES, FOREVER, Pace
from tailrace.lab.simulator.types import StepModel, WorkloadGroup
from tailrace.policies.models.hashed_random import fraction
from tailrace.policies.models.spec_cost_model import (
    DrafterCost,
    VerifierCost,
    coupled_tokens_s,
    keeps_up,
    renewal_tokens_s,
    tau_exact,
    verified,
)
from tailrace.policies.models.specactor_planner import Decoupled, Plan
from tailrace.policies.protocol.performance import MethodAcceptance

METHOD_SPREAD = 0.5
"""Assumed: standard deviation of a sample's log odds with one method about its group's. SpecActor 5.2: n-gram drafts
skip 16.9 to 43.6 % of the last samples' steps, which is 0.7 in log odds to both sides of the middle, a range of few."""

RECONFIGURE_STEPS = 1000
"""SpecActor 4.1: decoding iterations from one reconfiguration to the next."""

PLAIN = "plain"
"""The method name of chunks that do not draft."""

MOST_WINDOW = 16
"""Longest window that a copy may race with."""


class DraftSetup(NamedTuple):
    """The way to draft one sample: `window` tokens by `method`, ahead of verification or not; 0: plain decoding."""

    method: ModelledMethod
    window: int
    ahead: bool

    def shares(self, p: float, turns: bool) -> tuple[float, float, float]:
        """Returns tokens made, tokens computed and verifications in a round. `turns`: a waiting sample is drafted in
        one round and verified in the next.
        """
        width = self.window + 1
        if self.ahead:
            part = 1 / (2 - p**self.window)
            return tau_exact(p, self.window), width * part, part
        part = 0.5 if turns and self.window and self.method.draft_s(1) else 1.0
        return part * verified(p, width), part * width, part


@dataclass(frozen=True)
class Odds:
    """The odds that drafts are right, by method and sample: the method's table for a sample without mates, the odds
    times a log-normal factor of the sample's own.
    """

    seed: int
    spread: float = METHOD_SPREAD
    _known: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, method: ModelledMethod, sample: SimulatedSample) -> float:
        return self.chance(method, sample.progress.group, sample.index)

    def chance(self, method: ModelledMethod, group: WorkloadGroup, index: int) -> float:
        name = f"{method.name}\0{group.group_id}#{index}"
        if (name, group.predictability) not in self._known:
            p = method.acceptance.chance(group, index, 0, 0, 0)
            factor = exp(self.spread * NormalDist().inv_cdf(max(fraction(self.seed, name), 1e-12)))
            self._known[name, group.predictability] = p * factor / (1 - p + p * factor)
        return self._known[name, group.predictability]

    def facing(self, method: ModelledMethod) -> ModelledMethod:
        """Returns the method with each sample's own chances, for bounds."""
        return replace(method, acceptance=Faces(self, method))


@dataclass(frozen=True, slots=True)
class Faces:
    """`Odds` of one method, as a Chances."""

    odds: Odds
    method: ModelledMethod

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        return self.odds.chance(self.method, group, index)


class DraftModelSpeculation:
    """The `Speculation` of a replica whose own samples are drafted by `way`, and copies by the way of their method.

    With `policy`, Algorithm 2 runs every RECONFIGURE_STEPS: acceptance is then known to a hundredth, so the measured
    value is the chance itself.
    """

    def __init__(
        self, way: DraftSetup, odds: Odds, step: StepModel, races: Mapping[str, DraftSetup] | None = None,
        plan: Plan | None = None, policy: Decoupled | None = None,
    ):  # fmt: skip
        self._way, self._odds, self._step, self._races = way, odds, step, races or {}
        self._plan, self._policy = plan, policy
        self._own: dict[str, DraftSetup] = {}  # by Algorithm 2
        self._next = RECONFIGURE_STEPS if policy else FOREVER
        windows = [way.window, *(other.window for other in self._races.values()), policy.max_window if policy else 0]
        self.most = max(windows)
        self.methods = (way.method.name if way.window else PLAIN, *self._races)

    def stale(self, changes: int, running: int) -> bool:
        return changes * CHANGES > running

    def drop(self, chunk: SimulatedChunk) -> None:
        self._own.pop(chunk.sample.sample_id, None)

    def acceptance(self) -> tuple[MethodAcceptance, ...]:
        return ()

    def pace(self, chunks: list[SimulatedChunk], context_tokens: float) -> Pace:
        now = chunks[0].since
        if now >= self._next:
            self._reconfigure(chunks)
            self._next = now + RECONFIGURE_STEPS
        steps = self._next - now if self._policy else FOREVER
        ways = [self._way_of(chunk) for chunk in chunks]
        chances = [self._odds.of(way.method, chunk.sample) for way, chunk in zip(ways, chunks, strict=True)]
        ahead, added_s = any(way.ahead for way in ways), drafts_s(ways)
        if ahead and len(ways) == 1:
            return self._alone(ways[0], chances[0], context_tokens, steps)
        rates, costs, parts = zip(*(way.shares(p, ahead) for way, p in zip(ways, chances, strict=True)), strict=True)
        tests = [part * verified(p, way.window) for way, p, part in zip(ways, chances, parts, strict=True)]
        if ahead:
            return Pace(list(rates), list(costs), added_s, steps, parts=parts, tested=tests)
        return Pace(list(rates), list(costs), 0.0, steps, added_s, tested=tests)

    def _way_of(self, chunk: SimulatedChunk) -> DraftSetup:
        if chunk.method is not None:
            return self._races[chunk.method]
        return self._own.get(chunk.sample.sample_id, self._way)

    def _alone(self, way: DraftSetup, p: float, context_tokens: float, steps: int) -> Pace:
        """Returns the pace of a single sample: windows start w D or V apart, whichever is longer, after a right one,
        and w D + V after a wrong one.
        """
        draft_s = way.window * way.method.draft_s(1)
        verify_s = self._step.seconds(way.window + 1, context_tokens)
        right = p**way.window
        round_s = right * max(draft_s, verify_s) + (1 - right) * (draft_s + verify_s)
        rate = verified(p, way.window)
        return Pace([rate], [way.window + 1.0], 0.0, steps, round_s - verify_s, tested=[rate])

    def _reconfigure(self, chunks: Sequence[SimulatedChunk]) -> None:
        method = self._way.method
        measured = {c.sample.sample_id: self._odds.of(method, c.sample) for c in chunks if c.method is None}
        plans = self._policy.reconfigure(measured, self._plan)
        self._own = {sample_id: DraftSetup(method, plan.window, not plan.coupled) for sample_id, plan in plans.items()}


def drafts_s(ways: Sequence[DraftSetup]) -> float:
    """Returns the seconds of one draft model after the other, each over all of its samples, until the longest window is
    full.
    """
    batches: dict[str, tuple[ModelledMethod, int, int]] = {}
    for way in ways:
        if way.window:
            _, count, window = batches.get(way.method.name, (way.method, 0, 0))
            batches[way.method.name] = way.method, count + 1, max(window, way.window)
    return sum(window * method.draft_s(count) for method, count, window in batches.values())


def best_way(
    method: ModelledMethod, p: float, verifier: VerifierCost, samples: int, may_run_ahead: bool = True
) -> tuple[DraftSetup, float]:
    """Returns the way with the most tokens a second of each of `samples` samples, and these tokens a second: among all
    windows, coupled, or ahead if a drafter has to be waited for.
    """
    drafter = DrafterCost(1, method.token_s, method.base_s)
    rated = [(coupled_tokens_s(p, drafter, verifier, samples, w), -w, False) for w in range(MOST_WINDOW + 1)]
    if may_run_ahead and method.draft_s(1):
        rated += [
            (renewal_tokens_s(p, drafter, verifier, samples, w), -w, True)
            for w in range(1, MOST_WINDOW + 1)
            if keeps_up(p, drafter, verifier, samples, w)
        ]
    tokens_s, window, ahead = max(rated)
    return DraftSetup(method, -window, ahead), tokens_s
