"""Policies for samples in flight when the weights change: under which weights, and with whose KV, they continue."""

from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field


@runtime_checkable
class KvOnUpdate(Protocol):
    """`first_version`: the weights that made the sample's first token, or the present ones while it has none.
    `weights_version`: those that it continues under. Returns the version whose KV the core reads and writes.

    A policy with `finishes`, True, has samples end under the weights that they began with, see `core.drain`.
    """

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


class Finish(BaseModel):
    """Samples end under the weights that they began with; a replica takes new ones once it runs none of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    finishes: ClassVar[bool] = True
    type: Literal["finish"] = "finish"

    def kv_version(self, first_version: int, weights_version: int) -> int:
        return weights_version


def finishes(policy: KvOnUpdate) -> bool:
    """Returns whether samples end under the weights that they began with."""
    return getattr(policy, "finishes", False)


def drops_kv(policy: KvOnUpdate, old: int, new: int) -> bool:
    """Returns whether nothing reads KV of `old` once `new` has replaced it."""
    return not finishes(policy) and policy.kv_version(old, new) == new


KvOnUpdatePolicy = Annotated[Fresh | Keep | Finish, Field(discriminator="type")]
