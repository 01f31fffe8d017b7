"""Fairness between batches in flight: whose sample runs next, if batches of several drivers wait.

Contract: the core orders batches by `key`, the smallest first, and tries the next batch if no sample of one fits. A
sample that fits therefore never waits. `key` depends on the view alone: the core keeps it until the view changes.
Within a batch the ordering decides. With one batch, all members decide the same.
"""

from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.views import BatchView


@runtime_checkable
class Fairness(Protocol):
    """`apart`: True if each batch has its own order. Without it `key` has no effect."""

    apart: bool

    def key(self, batch: BatchView) -> tuple: ...


class OneQueue(BaseModel):
    """One order over the samples of all batches: priorities and shares do not count."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["one_queue"] = "one_queue"
    apart: ClassVar[bool] = False

    def key(self, batch: BatchView) -> tuple:
        return ()


class FairShares(BaseModel):
    """Higher priority first; then the batch whose running chunks hold the fewest tokens of KV for its share.

    The rule of weighted fair queueing without preemption: a chunk that runs is never stopped for another batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fair_shares"] = "fair_shares"
    apart: ClassVar[bool] = True

    def key(self, batch: BatchView) -> tuple:
        return -batch.priority, batch.running_tokens / batch.share


FairnessPolicy = Annotated[OneQueue | FairShares, Field(discriminator="type")]
