"""Draft budgets: the number of draft tokens of each running sample of a replica in an engine step.

Called by the engine once per step, with the drafts that the index proposes. Drafts never change tokens, so a policy can
only cost time; for `goodput` the loss is bounded by the errors of its cost model and of the probabilities. Contract:
`decide` is a pure function of view and memory, writes to neither, and gives each sample at most min(proposed,
max_draft_tokens) tokens. Memory is None at first, and holds a policy's state by slot.
"""

from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.families.aimd import Aimd
from tailrace.policies.families.closed_form import ClosedForm
from tailrace.policies.families.goodput import Goodput
from tailrace.policies.protocol.views import DraftView


@runtime_checkable
class Drafting(Protocol):
    """The interface of a drafting policy, built in or the user's own. The core reads `reads_classes` alone.

    `by_worth`: the policy drafts a token only if its chance is worth its time, so proposals may be cut at the first
    that is not.
    """

    reads_classes: bool
    by_worth: bool

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens of a sample: the engine requests no more from the index."""

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        """Returns the draft tokens of each row, int32[n], and the memory for the next step."""


class NoDrafting(BaseModel):
    """No drafts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["off"] = "off"
    reads_classes: ClassVar[bool] = False
    by_worth: ClassVar[bool] = False

    @property
    def max_draft_tokens(self) -> int:
        return 0

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        return np.zeros(len(view.proposed), np.int32), memory


class FixedBudget(BaseModel):
    """The same number for every sample at every step, as in other engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fixed"] = "fixed"
    file_keys: ClassVar[tuple[str, ...]] = ("tokens",)
    reads_classes: ClassVar[bool] = False
    by_worth: ClassVar[bool] = False
    tokens: int = Field(4, ge=1, le=64, description="draft tokens of a sample in a step")

    @property
    def max_draft_tokens(self) -> int:
        return self.tokens

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        return np.minimum(view.proposed, self.tokens).astype(np.int32), memory


class LengthClassBudget(BaseModel):
    """DAS 4.2: none for short answers, `medium_tokens` for medium ones, and twice that for long ones.

    An answer is promoted as it grows, at `StartChunk.class_starts`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["length_class"] = "length_class"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_classes: ClassVar[bool] = True
    by_worth: ClassVar[bool] = False
    medium_tokens: int = Field(
        4, ge=1, le=32, description="draft tokens of a medium answer in a step; of a long one 2x"
    )

    @property
    def max_draft_tokens(self) -> int:
        return 2 * self.medium_tokens

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        is_medium, is_long = view.generated >= view.medium_at, view.generated >= view.long_at
        budgets = self.medium_tokens * (is_medium.astype(np.int32) + (is_medium & is_long))
        return np.minimum(view.proposed, budgets).astype(np.int32), memory


class Concurrency(BaseModel):
    """Seer 4.4: as many for each as a sample may have and the batch's share allows, and only tokens that look right.

    The more samples run, the fewer drafts each gets; none once more than `batch_tokens` run. A draft ends before the
    first token that is right with less than `min_probability`. The paper gives no thresholds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["concurrency"] = "concurrency"
    file_keys: ClassVar[tuple[str, ...]] = ()
    reads_classes: ClassVar[bool] = False
    by_worth: ClassVar[bool] = False
    max_draft_tokens: int = Field(8, ge=1, le=64, description="max draft tokens of a sample in a step")
    batch_tokens: int = Field(32, ge=1, le=65_536, description="max draft tokens of all samples together in a step")
    min_probability: float = Field(0.3, ge=0.0, le=1.0, description="chance below which a draft token is dropped")

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        window = min(self.max_draft_tokens, self.batch_tokens // max(1, len(view.proposed)))
        sure = np.cumprod(view.right >= self.min_probability, axis=1).sum(axis=1)
        return np.minimum(np.minimum(view.proposed, sure), window).astype(np.int32), memory


DraftingPolicy = Annotated[
    NoDrafting | FixedBudget | Aimd | LengthClassBudget | ClosedForm | Concurrency | Goodput,
    Field(discriminator="type"),
]
