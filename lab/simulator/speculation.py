"""The pace of a replica's running chunks: tokens a step and their cost, between two changes of its batch.

`Policied` calls the service's drafting policy, with outcomes drawn from an acceptance model; `PlainDecoding` makes one
token a step. A decoupled drafter is another `Speculation`. Invariant: outcomes are a function of (seed, sample, count),
so the draws of one sample depend on no other. Called by `Replica`.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from tailrace.lab.simulator.chunks import SimulatedChunk
from tailrace.lab.simulator.types import StepModel, WorkloadGroup
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.models.acceptance_estimator import AcceptanceEstimator
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import MethodAcceptance, count_tested
from tailrace.policies.protocol.step_cost import StepCost
from tailrace.policies.protocol.views import DraftView

FOREVER = 1 << 62

REGIME_TOKENS = 512
"""Maximum tokens of a chunk for which a pace holds: over these, acceptance hardly changes with the length."""

CHANGES = 16
"""A pace holds until more than one chunk in this many has joined or left."""

DRAWS, LEAST_ROUNDS, MOST_ROUNDS = 64, 2, 8
"""A pace plays enough rounds of verifications that DRAWS are drawn, within bounds: their mean holds, and policies that
learn from outcomes see some of each. Means over few are noisy, and unbiased, since memory continues from pace to
pace."""

MATCH_TOKENS = 8
"""Context tokens that a proposal rests on: above every policy's min. The acceptance model already counts short
matches.
"""

MOST_CHANCE = 0.9999


class AcceptanceSource(Protocol):
    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        """Returns the chance that the next draft token of a sample is right if those before it are. `mates` of its
        group have begun.
        """


class Pace(NamedTuple):
    """For each chunk, tokens it makes and tokens it computes per step; `floor_s`: min seconds of a step; `steps`:
    how long this holds unless the batch changes; `added_s`: further seconds of a step; `parts`: for each chunk, the
    share of steps that it takes part in and reads its context for (empty: every step); `tested`: for each chunk, the
    draft tokens that are tested per step (empty: none)."""

    rates: list[float]
    costs: list[float]
    floor_s: float = 0.0
    steps: int = FOREVER
    added_s: float = 0.0
    parts: Sequence[float] = ()
    tested: Sequence[float] = ()


class Speculation(Protocol):
    most: int
    """Maximum draft tokens of a chunk in a step."""

    methods: tuple[str, ...]
    """Draft methods of this replica; the first is the default. Empty if the method cannot be selected per chunk."""

    def stale(self, changes: int, running: int) -> bool:
        """Returns whether a new pace is due after this many joins and leaves."""

    def pace(self, chunks: list[SimulatedChunk], context_tokens: float) -> Pace:
        """Returns the pace of chunks settled at the present step, with `context_tokens` of context together."""

    def drop(self, chunk: SimulatedChunk) -> None:
        """Drops a chunk that runs here no more."""

    def acceptance(self) -> tuple[MethodAcceptance, ...]:
        """Returns the draft tokens that were tested here, by method, as an engine reports them; empty if not known."""


class PlainDecoding:
    """One token a step."""

    most = 0
    methods = ()

    def stale(self, changes: int, running: int) -> bool:
        return False

    def pace(self, chunks: list[SimulatedChunk], context_tokens: float) -> Pace:
        return Pace([1.0] * len(chunks), [1.0] * len(chunks))

    def drop(self, chunk: SimulatedChunk) -> None:
        pass

    def acceptance(self) -> tuple[MethodAcceptance, ...]:
        return ()


class Policied:
    """Budgets by a drafting policy of the service, on one replica: its memory, its measured acceptance, its slots.

    A pace is the mean over a few decisions. Budgets come from the policy, which sees drawn outcomes of its last; given
    the budgets, tokens are expectations, 1 + sum of chance^j.
    """

    methods = ()

    def __init__(self, policy: Drafting, acceptance: AcceptanceSource, step: StepModel, seed: int):
        self._policy, self._acceptance, self._step, self._seed = policy, acceptance, step, seed
        self.most = policy.max_draft_tokens
        self._memory = None
        self._accepted = AcceptanceEstimator()
        self._slots, self._free = 0, []

    def stale(self, changes: int, running: int) -> bool:
        return changes * CHANGES > running

    def drop(self, chunk: SimulatedChunk) -> None:
        if chunk.slot >= 0:
            self._free.append(chunk.slot)
            chunk.slot = -1

    def pace(self, chunks: list[SimulatedChunk], context_tokens: float) -> Pace:
        count, most = len(chunks), self.most
        for chunk in chunks:
            if chunk.slot < 0:
                self._take_slot(chunk)
        chance = np.array([self._chance(chunk) for chunk in chunks])
        proposed = np.array([max(0, min(most, int(c.tokens - c.made) - 1)) for c in chunks], np.int32)
        view = self._view(chunks, chance, proposed, self._cost(count, context_tokens))
        rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, DRAWS // count))
        right = self._outcomes(chunks, chance, rounds)
        drafted, made, tries = np.zeros((3, count))
        for turn in range(rounds):
            budgets, self._memory = self._policy.decide(view, self._memory)
            accepted = np.minimum(right[:, turn], budgets).astype(np.int32)
            drafted += budgets
            tries += (1.0 - chance**budgets) / (1.0 - chance)
            made += chance * (1.0 - chance**budgets) / (1.0 - chance)
            self._count(budgets, accepted)
            view = view._replace(
                drafted_last=budgets, accepted_last=accepted, verifications=view.verifications + 1,
                acceptance=self._accepted.overall(),
            )  # fmt: skip
        for chunk, was_drafted, was_accepted in zip(chunks, budgets.tolist(), accepted.tolist(), strict=True):
            chunk.drafted_last, chunk.accepted_last = was_drafted, was_accepted
            chunk.verified += rounds
        rates, costs = 1.0 + made / rounds, 1.0 + drafted / rounds
        steps = max(1, int(REGIME_TOKENS / float(rates.max())))
        return Pace(rates.tolist(), costs.tolist(), 0.0, steps, tested=(tries / rounds).tolist())

    def _take_slot(self, chunk: SimulatedChunk) -> None:
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        chunk.slot = self._free.pop()
        chunk.verified = chunk.drafted_last = chunk.accepted_last = 0

    def _chance(self, chunk: SimulatedChunk) -> float:
        sample = chunk.sample
        progress = sample.progress
        group = progress.group
        chance = self._acceptance.chance(
            group, sample.index, chunk.generated, progress.begun - 1, len(group.past_lengths)
        )
        return min(max(chance, 0.0), MOST_CHANCE)

    def _outcomes(self, chunks: list[SimulatedChunk], chance: np.ndarray, rounds: int) -> np.ndarray:
        """Draws the number of right draft tokens before the first wrong one, of endless drafts: float64[chunks,
        rounds], geometric.
        """
        noise = b""
        for chunk in chunks:
            sample = chunk.sample
            name = f"{self._seed}\0{sample.progress.step}\0{sample.sample_id}\0{sample.draws}"
            noise += blake2b(name.encode(), digest_size=8 * rounds).digest()
            sample.draws += 1
        uniform = (np.frombuffer(noise, "<u8").reshape(-1, rounds) + 0.5) / 2.0**64
        return np.floor(np.log(uniform) / np.log(np.maximum(chance, 1e-12))[:, None])

    def _count(self, budgets: np.ndarray, accepted: np.ndarray) -> None:
        verifications = int(np.count_nonzero(budgets))
        if verifications:
            of_all = float(count_tested(accepted, budgets).sum())
            self._accepted.count(DraftMethod.GROUP, float(accepted.sum()), of_all, verifications=verifications)

    def acceptance(self) -> tuple[MethodAcceptance, ...]:
        return self._accepted.report()

    def _cost(self, count: int, context_tokens: float) -> StepCost:
        """Returns the replica's own step model at the present context, as an engine would have measured it."""
        top = count * (1 + self.most) + 1
        if self._step.experts_s:
            tokens = sorted({1, count, top, *(1 << k for k in range(1, top.bit_length()) if 1 << k < top)})
        else:
            tokens = [1, top]
        return StepCost(
            tuple(float(n) for n in tokens), tuple(max(1e-9, self._step.seconds(n, context_tokens)) for n in tokens)
        )

    def _view(
        self, chunks: list[SimulatedChunk], chance: np.ndarray, proposed: np.ndarray, cost: StepCost
    ) -> DraftView:
        def column(values, kind=np.int32):
            return np.array(values, kind)

        places = np.arange(self.most)
        return DraftView(
            right=np.where(places < proposed[:, None], chance[:, None], 0.0).astype(np.float32),
            proposed=proposed,
            match_tokens=np.full(len(chunks), MATCH_TOKENS, np.int32),
            slot=column([c.slot for c in chunks], np.int64),
            verifications=column([c.verified for c in chunks], np.int64),
            drafted_last=column([c.drafted_last for c in chunks]),
            accepted_last=column([c.accepted_last for c in chunks]),
            generated=column([c.generated for c in chunks]),
            expected=column([c.expected_tokens for c in chunks]),
            medium_at=column([c.class_starts[0] for c in chunks]),
            long_at=column([c.class_starts[1] for c in chunks]),
            acceptance=self._accepted.overall(),
            cost=cost,
        )


def by_policy(
    policy: Drafting, acceptance: AcceptanceSource | None, step: StepModel, seed: int
) -> Callable[[int], Speculation]:
    """Returns the way of each replica, by its index; without chances, or a policy that drafts, one token a step."""
    if acceptance is None or not policy.max_draft_tokens:
        return lambda index: PlainDecoding()
    return lambda index: Policied(policy, acceptance, step, seed)
