"""Prefetch policies: the number of waiting samples whose next replica the core predicts, to bring their KV there
early.
"""

from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field


@runtime_checkable
class Prefetching(Protocol):
    def look_ahead(self, waiting: int) -> int: ...


class NoPrefetch(BaseModel):
    """None: a sample that moves fetches its KV when it starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["off"] = "off"

    def look_ahead(self, waiting: int) -> int:
        return 0


class NextUp(BaseModel):
    """The first `depth` in order: their KV travels while they wait for room."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["next_up"] = "next_up"
    file_keys: ClassVar[tuple[str, ...]] = ()
    depth: int = Field(1, ge=1, description="waiting samples, first in order, whose KV is brought to their next node")

    def look_ahead(self, waiting: int) -> int:
        return min(self.depth, waiting)


PrefetchPolicy = Annotated[NoPrefetch | NextUp, Field(discriminator="type")]
