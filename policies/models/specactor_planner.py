"""Plans of drafter GPUs, verifier GPUs and draft windows (SpecActor 4.1, Algorithms 1 and 2).

Invariant: a plan has the most tokens per second over its options. Plain decoding is one of them, so drafting is planned
only if it pays. Ties go to fewer GPUs, then to the shorter window. Pure: same figures, same plan. Called by the
simulator as a step starts (`plan`) and at intervals of engine steps (`reconfigure`); live by `draft_models` (`best`,
`better`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.models.spec_cost_model import (
    DrafterCost,
    VerifierCost,
    coupled_tokens_s,
    decoupled_tokens_s,
    keeps_up,
    published_tokens_s,
    renewal_tokens_s,
)

TINY_S = 1e-12
"""Bound that keeps ratios finite for a drafter that takes no time."""

RATES = {"going_on": decoupled_tokens_s, "renewal": renewal_tokens_s, "published": published_tokens_s}


@dataclass(frozen=True, slots=True)
class Plan:
    """Use of each `drafter.gpus + verifier.gpus` GPUs of the cluster, for `samples` samples.

    `drafter` is None and `window` 0 for plain decoding by the verifiers. `tokens_s`: expected tokens per second of each
    sample.
    """

    drafter: DrafterCost | None
    verifier: VerifierCost
    window: int
    samples: int
    tokens_s: float
    reason: str

    @property
    def drafter_gpus(self) -> int:
        return self.drafter.gpus if self.drafter else 0

    @property
    def verifier_gpus(self) -> int:
        return self.verifier.gpus


class SamplePlan(NamedTuple):
    """Draft mode of one sample. A coupled window of 0 is plain decoding."""

    window: int
    coupled: bool
    tokens_s: float
    reason: str


class Decoupled(BaseModel):
    """SpecActor 4.1. `rate`: the formula for tokens a second of decoupled drafting.

    `going_on`: Tailrace's engines, which never wait. `renewal`: SpecActor's rounds, computed exactly. `published`: the
    paper's own formula for these rounds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["decoupled"] = "decoupled"
    max_window: int = Field(32, ge=1, le=256, description="longest draft window that is tried")
    rate: Literal["going_on", "renewal", "published"] = Field(
        "going_on", description="whose protocol; published: too many tokens per round, each too slow"
    )

    def plan(
        self, samples: int, gpus: int, p: float, drafters: Sequence[DrafterCost], verifiers: Sequence[VerifierCost]
    ) -> Plan:
        """Returns the best of every verifier, every drafter with no more GPUs than it, and every useful window
        (Algorithm 1).

        `samples` of the whole step over `gpus` GPUs; p: mean acceptance of a draft token. A pair takes ceil((g_d + g_v)
        samples / gpus) of them. Raises ValueError if no verifier fits into the cluster.
        """
        fitting = [verifier for verifier in verifiers if verifier.gpus <= gpus]
        if not fitting:
            raise ValueError(f"no verifier fits into {gpus} GPUs")
        plain, *found = [
            max((_plain(verifier, ceil(verifier.gpus * samples / gpus)) for verifier in fitting), key=_worth),
            *(
                self._best(ceil((drafter.gpus + verifier.gpus) * samples / gpus), p, drafter, verifier)
                for verifier in fitting
                for drafter in drafters
                if drafter.gpus <= verifier.gpus and drafter.gpus + verifier.gpus <= gpus
            ),
        ]
        return max((plain, *(plan for plan in found if plan)), key=_worth)

    def best(self, samples: int, p: float, drafter: DrafterCost, verifier: VerifierCost) -> Plan:
        """Returns the best window of a pair for `samples` samples, or plain decoding if better (Algorithm 1)."""
        plans = (_plain(verifier, samples), self._best(samples, p, drafter, verifier))
        return max((plan for plan in plans if plan), key=_worth)

    def reconfigure(self, acceptances: Mapping[str, float], plan: Plan) -> dict[str, SamplePlan]:
        """Returns, for each sample that accepts less than the mean, the better of coupled and decoupled drafting
        (Algorithm 2).

        Other samples keep the plan's window. Empty if the plan has no drafter.
        """
        if plan.drafter is None or not acceptances:
            return {}
        mean = sum(acceptances.values()) / len(acceptances)
        below = {sample_id: round(p, 2) for sample_id, p in sorted(acceptances.items()) if p < mean}
        better = {p: self.better(p, plan.drafter, plan.verifier) for p in sorted(set(below.values()))}
        return {sample_id: better[p] for sample_id, p in below.items()}

    def better(self, p: float, drafter: DrafterCost, verifier: VerifierCost) -> SamplePlan:
        """Returns the better mode for a sample of acceptance p, to a hundredth. Rated at a batch of one, as in the
        paper.
        """
        rate, windows = RATES[self.rate], range(1, self.max_window + 1)
        coupled_s, waiting = max((coupled_tokens_s(p, drafter, verifier, 1, w), -w) for w in (0, *windows))
        decoupled_s, ahead = max((rate(p, drafter, verifier, 1, w), -w) for w in windows)
        reason = f"accepts {p:.2f}: coupled {coupled_s:.1f} tokens/s, decoupled {decoupled_s:.1f}"
        if decoupled_s > coupled_s:
            return SamplePlan(-ahead, False, decoupled_s, reason)
        return SamplePlan(-waiting, True, coupled_s, reason)

    def _best(self, samples: int, p: float, drafter: DrafterCost, verifier: VerifierCost) -> Plan | None:
        """Returns the best plan of this pair, or None if the drafter cannot keep up with any window."""
        rate = RATES[self.rate]
        plans = [
            Plan(
                drafter=drafter,
                verifier=verifier,
                window=window,
                samples=samples,
                tokens_s=rate(p, drafter, verifier, samples, window),
                reason=f"accepts {p:.2f}",
            )
            for window in self._windows(samples, p, drafter, verifier)
        ]
        return max(plans, key=_worth, default=None)

    def _windows(self, samples: int, p: float, drafter: DrafterCost, verifier: VerifierCost) -> list[int]:
        """Returns the windows worth a try.

        In SpecActor's rounds the drafter is the slower one beyond them: longer windows gain less than they take. The
        paper's end is max(ceil(V' / D'), ceil(beta / alpha)).
        """
        windows = range(1, self.max_window + 1)
        if self.rate == "going_on":
            return list(windows)
        if self.rate == "renewal":
            return [w for w in windows if keeps_up(p, drafter, verifier, samples, w)]
        by_base = verifier.base_s / max(drafter.base_s, TINY_S)
        by_sample = [verifier.per_sample_s(w) / max(drafter.sample_s, TINY_S) for w in windows]
        return [w for w, ratio in zip(windows, by_sample, strict=True) if w <= ceil(max(ratio, by_base))]


def _plain(verifier: VerifierCost, samples: int) -> Plan:
    return Plan(
        drafter=None,
        verifier=verifier,
        window=0,
        samples=samples,
        tokens_s=1 / verifier.seconds(samples, 0),
        reason="no drafter pays",
    )


def _worth(plan: Plan) -> tuple[float, int, int]:
    return plan.tokens_s, -plan.drafter_gpus - plan.verifier_gpus, -plan.window
