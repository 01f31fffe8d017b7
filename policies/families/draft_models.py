"""How samples are drafted by draft models, chunk by chunk: as configured, or as SpecActor's planner says (4.1).

Contract: pure functions of a view, so that whoever replays the events gets the same answers. `Planned` asks the planner
that the simulator's systems plan by, with figures that were measured here. Asked by `policies.core.draft_planner`
alone.
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
    """What the core asks. `acceptance`: of a draft token, all before it being right, until some have been seen;
    `replicas`: draft models that run, or the most where the tail policy says how many."""

    acceptance: float
    replicas: int

    def way(self, view: DraftModelsView, acceptance: float) -> tuple[DraftMode | None, str]:
        """How a sample of this acceptance is drafted in its next chunk, and why; None: as the drafter is configured."""

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
    """Algorithm 1 for what runs as a chunk starts; Algorithm 2 for samples that accept less than the mean.

    Both by the rates of `policies.models.spec_cost_model` where nobody waits. By default with guesses, for a model of
    32 billion parameters on four GPUs and one of half a billion; `tailrace profile` measures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["planned"] = "planned"
    needs_drafter: ClassVar[bool] = True
    acceptance: float = Field(0.5, ge=0.0, le=1.0, description="of a draft token, until samples have shown their own")
    drafter: DrafterStep = Field(DrafterStep(), description="what a step of the draft model takes")
    verifier: VerifierStep = Field(VerifierStep(), description="what a step of an engine takes")
    max_window: int = Field(8, ge=1, le=64, description="longest window that is tried; engines verify `draft_tokens`")
    replicas: int = Field(1, ge=1, description="draft models that run; the most where tail says how many")

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
