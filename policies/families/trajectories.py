"""Trajectories: how many samples of several turns are active at once, and which keep their KV between two turns.

Contract: answers depend on the arguments alone. An active trajectory has begun and not ended; its KV lies on a replica
or in the pool. The core begins the others in order of arrival, and at least one is always active. A member that is not
`on` leaves all of that to engines and pool.
"""

from math import inf
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.views import TrajectoryLoad


@runtime_checkable
class ActiveTrajectories(Protocol):
    on: bool

    def fits(self, load: TrajectoryLoad, context_tokens: int) -> bool:
        """Returns whether one more trajectory, of this context, may begin."""

    def is_overfull(self, load: TrajectoryLoad) -> bool:
        """Returns whether one has to give up its KV, and to begin again later."""

    def keeps(self, left_s: float, back_s: float, waits: bool) -> bool:
        """Returns whether a replica keeps KV that is expected to be needed in `left_s`, and takes `back_s` to bring
        back; if not, others may take the room. `waits`: another sample waits for it.
        """

    def gives_up(self, price_s: float, compute_s: float, active: float) -> bool:
        """Returns whether a pausing trajectory gives its KV to one that waits to begin. `price_s`: expected seconds of
        waiting for each return that is worth waiting for; `compute_s`: to compute its context again; `active`:
        trajectories for each replica.
        """

    def hold_s(self, expected_s: float) -> float:
        """Returns the seconds for which a sample is held after a turn if its caller sets none. `expected_s`: of the
        pause.
        """


class AllAtOnce(BaseModel):
    """All trajectories are active. Caches and the pool drop what was used least recently."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["all_at_once"] = "all_at_once"
    file_keys: ClassVar[tuple[str, ...]] = ()
    on: ClassVar[bool] = False
    hold_gaps: float = Field(10.0, ge=1, description="expected pauses for which a sample is held after a turn")

    def fits(self, load: TrajectoryLoad, context_tokens: int) -> bool:
        return True

    def is_overfull(self, load: TrajectoryLoad) -> bool:
        return False

    def keeps(self, left_s: float, back_s: float, waits: bool) -> bool:
        return False

    def gives_up(self, price_s: float, compute_s: float, active: float) -> bool:
        return False

    def hold_s(self, expected_s: float) -> float:
        return self.hold_gaps * expected_s


class ByKv(BaseModel):
    """As many as pool and replicas can hold: contexts now, and a share of what they are expected to grow by."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["by_kv"] = "by_kv"
    file_keys: ClassVar[tuple[str, ...]] = ()
    on: ClassVar[bool] = True
    full_share: float = Field(0.9, gt=0, le=1, description="share of the KV to fill: beyond it Mooncake evicts")
    growth_share: float = Field(
        0.1, ge=0, le=1, description="share of the expected growth to hold free: some end while others grow"
    )

    keep_from_s: float = Field(
        1.0, ge=0, description="min seconds to bring KV back for a replica to keep it; else load is balanced freely"
    )

    give_up_from: float = Field(
        4.0, ge=0, description="gain over loss from which a pausing one gives its KV to one that waits to begin"
    )

    def fits(self, load: TrajectoryLoad, context_tokens: int) -> bool:
        growth_tokens = self.growth_share * load.growth_tokens * (load.active + 1)
        return load.context_tokens + context_tokens + growth_tokens <= self.full_share * load.capacity_tokens

    def is_overfull(self, load: TrajectoryLoad) -> bool:
        return load.context_tokens > self.full_share * load.capacity_tokens

    def keeps(self, left_s: float, back_s: float, waits: bool) -> bool:
        return back_s >= self.keep_from_s and (not waits or left_s < back_s)

    def gives_up(self, price_s: float, compute_s: float, active: float) -> bool:
        """The room of one of `active` trajectories is worth that part of the replica's time."""
        return price_s > self.give_up_from * compute_s * active

    def hold_s(self, expected_s: float) -> float:
        """Until its trajectory ends: others take its room by `gives_up`."""
        return inf


TrajectoriesPolicy = Annotated[AllAtOnce | ByKv, Field(discriminator="type")]
