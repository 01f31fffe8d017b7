"""How many draft tokens each running sample of a replica gets in this engine step (its draft budget).

Called by the engine once per step, with the drafts that the index proposes. Drafts never change tokens, so a policy
can only cost time; `goodput` does so no more than its cost model and the proposals' probabilities are wrong.
Contract: `decide` is a pure function of view and memory, writes to neither, and gives each sample at most
min(proposed, most) tokens. Memory is None at first, and holds what a policy keeps by slot.
"""

from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from policies.aimd import Aimd
from policies.closed_form import ClosedForm
from policies.views import DraftView


@runtime_checkable
class Drafting(Protocol):
    """What the engine asks of a drafting policy, built in or the user's own; the core, whether it `reads_classes`."""

    reads_classes: bool

    @property
    def most(self) -> int:
        """Most draft tokens that one sample can ever get: the engine asks the index for no more."""

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        """Draft tokens of each row, int32[n], and the memory for the next step."""


class Off(BaseModel):
    """No drafts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["off"] = "off"
    reads_classes: ClassVar[bool] = False

    @property
    def most(self) -> int:
        return 0

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        return np.zeros(len(view.proposed), np.int32), memory


class Fixed(BaseModel):
    """The same for every sample at every step: what most engines do."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fixed"] = "fixed"
    reads_classes: ClassVar[bool] = False
    tokens: int = Field(4, ge=1, le=64, description="draft tokens of a sample in a step")

    @property
    def most(self) -> int:
        return self.tokens

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        return np.minimum(view.proposed, self.tokens).astype(np.int32), memory


class LengthClass(BaseModel):
    """DAS 4.2: none for short answers, `medium_tokens` for medium ones, and twice that for long ones.

    An answer is promoted as it grows, at `StartChunk.class_starts`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["length_class"] = "length_class"
    reads_classes: ClassVar[bool] = True
    medium_tokens: int = Field(
        4, ge=1, le=32, description="draft tokens of a medium answer in a step; of a long one 2x"
    )

    @property
    def most(self) -> int:
        return 2 * self.medium_tokens

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        is_medium, is_long = view.generated >= view.medium_at, view.generated >= view.long_at
        budgets = self.medium_tokens * (is_medium.astype(np.int32) + (is_medium & is_long))
        return np.minimum(view.proposed, budgets).astype(np.int32), memory


class Concurrency(BaseModel):
    """Seer 4.4: as many for each as a sample may have and the batch's share allows, and only tokens that look right.

    The more samples run, the fewer drafts each gets; none once more than `batch_tokens` run. A draft ends before the
    first token that is right with less than `least_probability`. The paper gives no thresholds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["concurrency"] = "concurrency"
    reads_classes: ClassVar[bool] = False
    most: int = Field(8, ge=1, le=64, description="most draft tokens of a sample in a step")
    batch_tokens: int = Field(32, ge=1, le=65_536, description="most draft tokens of all samples together in a step")
    least_probability: float = Field(0.3, ge=0.0, le=1.0, description="chance below which a draft token is dropped")

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        window = min(self.most, self.batch_tokens // max(1, len(view.proposed)))
        sure = np.cumprod(view.right >= self.least_probability, axis=1).sum(axis=1)
        return np.minimum(np.minimum(view.proposed, sure), window).astype(np.int32), memory


class Goodput(BaseModel):
    """Most expected tokens a second of step time, by measured step costs; late in a step, of the longest samples.

    Draft token j of sample i is kept with the product of the chances of tokens 1 to j. Taking tokens in falling order
    of that product, the expected tokens of the step over its time, (n + sum of products) / t(n + taken), is best at
    one of the prefixes: products fall along a sample, so each prefix is a choice of budgets, and the best one of its
    size. Budget 0 is among them and wins unless another gains `margin`. When few samples run, nothing waits for their
    places and the longest decides when the step ends: each one's tokens then count by its share of the longest
    expected remainder, to the power of `tail_weight`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["goodput"] = "goodput"
    reads_classes: ClassVar[bool] = False
    most: int = Field(16, ge=1, le=64, description="most draft tokens of a sample in a step")
    margin: float = Field(0.01, ge=0.0, le=1.0, description="least predicted gain over no drafts")
    tail_weight: float = Field(1.0, ge=0.0, le=8.0, description="how much the longest sample counts late; 0: no more")
    tail_running: int = Field(4, ge=0, le=4096, description="late is when at most so many samples run here")

    def decide(self, view: DraftView, memory: Any) -> tuple[np.ndarray, Any]:
        count = len(view.proposed)
        window = min(self.most, view.right.shape[1])
        if not count or not window:
            return np.zeros(count, np.int32), memory
        weights = self._weights(view)
        at_hand = np.arange(window) < view.proposed[:, None]
        gains = np.cumprod(np.where(at_hand, view.right[:, :window], 0.0), axis=1, dtype=np.float64)
        gains = (gains * weights[:, None]).T.ravel()  # token by token, so that of equals the earlier ones come first
        order = np.argsort(-gains, kind="stable")
        order = order[: np.count_nonzero(gains)]
        tokens = weights.sum() + np.concatenate(([0.0], np.cumsum(gains[order])))
        rates = tokens / view.cost.at(count + np.arange(len(tokens)))
        best = int(np.argmax(rates))
        if rates[best] < rates[0] * (1.0 + self.margin):
            best = 0
        return np.bincount(order[:best] % count, minlength=count).astype(np.int32), memory

    def _weights(self, view: DraftView) -> np.ndarray:
        count = len(view.proposed)
        if count > self.tail_running:
            return np.ones(count)
        left = np.maximum(view.expected - view.generated, 1).astype(np.float64)
        return (left / left.max()) ** self.tail_weight


DraftingPolicy = Annotated[
    Off | Fixed | Aimd | LengthClass | ClosedForm | Concurrency | Goodput, Field(discriminator="type")
]
