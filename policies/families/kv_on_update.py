"""Policies for KV when the weights change during a sample: the version whose KV the core reads and writes for it."""

from typing import Annotated, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field


@runtime_checkable
class KvOnUpdate(Protocol):
    """`first_version`: the weights that made the sample's first token, or the present ones while it has none."""

    def kv_version(self, first_version: int, weights_version: int) -> int: ...


class Fresh(BaseModel):
    """The present version: a sample's context is computed again after every update."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fresh"] = "fresh"

    def kv_version(self, first_version: int, weights_version: int) -> int:
        return weights_version


class Keep(BaseModel):
    """The version that the sample began under: it keeps its KV over updates, and new samples are always fresh."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["keep"] = "keep"

    def kv_version(self, first_version: int, weights_version: int) -> int:
        return first_version


KvOnUpdatePolicy = Annotated[Fresh | Keep, Field(discriminator="type")]
