"""Policies of draft models, chunk by chunk: as configured, or by SpecActor's planner (4.1).

Contract: pure functions of a view, so a replay of the events gives the same answers. `Planned` uses the planner of the
simulator's systems, with figures measured here. Called by `policies.core.draft_planner` alone.
"""

from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.models.spec_cost_model import DrafterCost, VerifierCost
from tailrace.policies.models.specactor_planner import Decoupled, Plan
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.views import DraftModelsView


@runtime_checkable
class DraftModels(Protocol):
    """The interface to the core. `acceptance`: prior chance that a draft token is right if all earlier ones are.
    `replicas`: running draft models, or their max where the tail policy decides the number; 0: no `way` is asked."""

    acceptance: float
    replicas: int

    def way(self, view: DraftModelsView, acceptance: float) -> tuple[DraftMode | None, str]:
        """The draft mode of a sample's next chunk with its reason, or None for the drafter's configured mode."""

    def gain(self, view: DraftModelsView) -> float:
        """How many times as fast as without draft models samples are expected to be; 1.0 where nothing is planned."""


class AsConfigured(BaseModel):
    """The draft model's own configuration says how, of every sample."""

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

    Both use the rates of `policies.models.spec_cost_model` without waiting. The default figures are guesses for a model
    of 32 billion parameters on four GPUs with a draft model of half a billion; `tailrace profile` measures real ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["planned"] = "planned"
    needs_drafter: ClassVar[bool] = True
    acceptance: float = Field(0.5, ge=0.0, le=1.0, description="of a draft token, until samples have shown their own")
    drafter: DrafterStep = Field(DrafterStep(), description="cost of a step of the draft model")
    verifier: VerifierStep = Field(VerifierStep(), description="cost of a step of an engine")
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
        return plan.tokens_s * plan.verifier.seconds(plan.samples, 0)

    @property
    def _planner(self) -> Decoupled:
        return Decoupled(max_window=self.max_window)

    def _plan(self, view: DraftModelsView) -> Plan:
        """A drafter is rated as if it had the verifier's samples alone, each as slow as those that it has make it."""
        verified, drafted = max(1, view.verified), max(1, view.drafted)
        drafted = 1 << (drafted - 1).bit_length()  # a power of two, so that few plans are made
        drafter = DrafterCost(1, self.drafter.sample_s * drafted / verified, self.drafter.base_s)
        verifier = VerifierCost(1, self.verifier.sample_s, self.verifier.token_s, self.verifier.base_s)
        return _best(self._planner, verified, round(view.acceptance, 2), drafter, verifier)


_best, _better = lru_cache(maxsize=8192)(Decoupled.best), lru_cache(maxsize=8192)(Decoupled.better)

DraftModelsPolicy = Annotated[AsConfigured | Planned, Field(discriminator="type")]
