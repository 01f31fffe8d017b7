"""Policies of draft models, chunk by chunk: as configured, or by SpecActor's planner (4.1).

Contract: pure functions of a view, so a replay of the events gives the same answers. `Planned` uses the planner of the
simulator's systems, with the figures that engines have measured. Called by `policies.core.draft_planner` alone.
"""

from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.models.spec_cost_model import DrafterCost, VerifierCost
from tailrace.policies.models.specactor_planner import TINY_S, Decoupled, Plan
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.performance import Performance, seconds_at
from tailrace.policies.protocol.views import DraftModelsView


@runtime_checkable
class DraftModels(Protocol):
    """The interface to the core. `acceptance`: prior chance that a draft token is right if all earlier ones are.
    `replicas`: number of running draft models, or their maximum if the tail policy decides the number; 0: `way` is not
    called.
    """

    acceptance: float
    replicas: int

    def way(self, view: DraftModelsView, acceptance: float) -> tuple[DraftMode | None, str]:
        """Returns the draft mode of a sample's next chunk with its reason, or None for the drafter's configured
        mode.
        """

    def gain(self, view: DraftModelsView) -> float:
        """Returns the expected speed-up of samples over no draft models; 1.0 if nothing is planned."""


class AsConfigured(BaseModel):
    """The mode in the draft model's own configuration, the same for every sample."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["as_configured"] = "as_configured"
    acceptance: ClassVar[float] = 0.0
    replicas: ClassVar[int] = 0

    def way(self, view: DraftModelsView, acceptance: float) -> tuple[DraftMode | None, str]:
        return None, ""

    def gain(self, view: DraftModelsView) -> float:
        return 1.0


class DrafterStep(BaseModel):
    """A draft token for each of b samples takes base_s + b sample_s."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    base_s: float = Field(2.2e-3, gt=0.0, description="of a step, whatever is in it")
    sample_s: float = Field(2e-6, ge=0.0, description="more for each sample")


class VerifierStep(BaseModel):
    """A step that verifies w draft tokens of each of b samples takes base_s + b (sample_s + (w + 1) token_s)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    base_s: float = Field(0.013, gt=0.0, description="of a step, whatever is in it")
    sample_s: float = Field(1e-5, ge=0.0, description="more for each sample")
    token_s: float = Field(2e-5, ge=0.0, description="more for each token")


class Planned(BaseModel):
    """Algorithm 1 for the running chunks as a chunk starts; Algorithm 2 for samples that accept less than the mean.

    Both use the rates of `policies.models.spec_cost_model` without waiting, and the costs of steps that the engine and
    its draft models have measured. Until then, figures are guesses for a model of 32 billion parameters on four GPUs
    with a draft model of half a billion. `drafter` and `verifier` replace the measured ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["planned"] = "planned"
    file_keys: ClassVar[tuple[str, ...]] = ()
    needs_drafter: ClassVar[bool] = True
    acceptance: float = Field(0.5, ge=0.0, le=1.0, description="of a draft token, until replicas have tested some")
    drafter: DrafterStep | None = Field(None, description="cost of a step of the draft model; null: as measured")
    verifier: VerifierStep | None = Field(None, description="cost of a step of an engine; null: as measured")
    max_window: int = Field(8, ge=1, le=64, description="longest window that is tried; engines verify `draft_tokens`")
    replicas: int = Field(1, ge=1, description="running draft models; their max where tail decides the number")

    def way(self, view: DraftModelsView, acceptance: float) -> tuple[DraftMode | None, str]:
        mean, own = round(view.acceptance, 2), round(acceptance, 2)
        plan = self._plan(view)
        if plan.drafter is None:
            return DraftMode(0, True), f"at an acceptance of {mean:.2f} no draft model pays"
        if own >= mean:
            return DraftMode(plan.window, False), f"drafts {plan.window} ahead, {plan.reason}"
        better = _better(self._planner, own, plan.drafter, plan.verifier)
        return DraftMode(better.window, better.coupled), f"drafts {better.window}, {better.reason}"

    def gain(self, view: DraftModelsView) -> float:
        plan = self._plan(view)
        return max(1.0, plan.tokens_s * plan.verifier.seconds(plan.samples, 0))  # plain decoding is a plan

    @property
    def _planner(self) -> Decoupled:
        return Decoupled(max_window=self.max_window)

    def _plan(self, view: DraftModelsView) -> Plan:
        """Returns the plan. A drafter is rated as if it had the verifier's samples alone, each as slow as its present
        samples make it.
        """
        verified, drafted = max(1, view.verified), max(1, view.drafted)
        drafted = 1 << (drafted - 1).bit_length()  # a power of two, so that few plans are made
        step = self.drafter or measured_drafter(view.performance, drafted) or DrafterStep()
        drafter = DrafterCost(1, step.sample_s * drafted / verified, step.base_s)
        engine = self.verifier or measured_verifier(view.performance, verified, self.max_window) or VerifierStep()
        verifier = VerifierCost(1, engine.sample_s, engine.token_s, engine.base_s)
        return _best(self._planner, verified, round(view.acceptance, 2), drafter, verifier)


def measured_drafter(known: Performance | None, samples: int) -> DrafterStep | None:
    """Returns a draft model's step, exact for one sample and for `samples`; None if none was measured."""
    if known is None or not known.drafter_seconds:
        return None
    one_s, all_s = (seconds_at(count, known.drafter_samples, known.drafter_seconds) for count in (1, max(2, samples)))
    sample_s = (all_s - one_s) / (max(2, samples) - 1)
    return DrafterStep(base_s=rough(max(TINY_S, one_s - sample_s)), sample_s=rough(max(0.0, sample_s)))


def measured_verifier(known: Performance | None, samples: int, window: int) -> VerifierStep | None:
    """Returns an engine's step, exact for `samples` samples without drafts and with windows of `window`; None if none
    was measured.
    """
    if known is None:
        return None
    plain_s, full_s = (known.verify_s(samples, samples * width) for width in (1, 1 + window))
    token_s = max(0.0, full_s - plain_s) / (samples * window)
    base_s = plain_s - samples * (known.chunk_s + token_s)
    return VerifierStep(base_s=rough(max(TINY_S, base_s)), sample_s=rough(known.chunk_s), token_s=rough(token_s))


def rough(value: float) -> float:
    """Rounds to two digits: few plans are made, and a measured figure moves less from report to report."""
    return float(f"{value:.1e}")


_best, _better = lru_cache(maxsize=8192)(Decoupled.best), lru_cache(maxsize=8192)(Decoupled.better)

DraftModelsPolicy = Annotated[AsConfigured | Planned, Field(discriminator="type")]
