"""Where a chunk runs. A placement picks one replica that has room; `memory` is its own value, kept by the core.

Contract: the replica returned is ready and has room for `need_tokens`; at least one such replica exists when
`choose` is called. `sticky` placements see each sample once: its later chunks go where the first one went.
"""

from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from policies.board import Board
from policies.views import SampleView


@runtime_checkable
class Placement(Protocol):
    """What the core asks of a placement. `memory` is None at the first call."""

    sticky: bool

    def choose(self, sample: SampleView, need_tokens: int, board: Board, memory: Any) -> tuple[str, Any]: ...


class LeastKv(BaseModel):
    """Seer's rule: the replica with the most free KV; a sample moves only if that gains `stay_tokens` of room."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["least_kv"] = "least_kv"
    sticky: ClassVar[bool] = False
    stay_tokens: int = Field(0, ge=0, description="KV room another replica must have more before a sample moves there")

    def choose(self, sample: SampleView, need_tokens: int, board: Board, memory: Any) -> tuple[str, Any]:
        best = board.roomiest()
        if self.stay_tokens and sample.last_replica is not None:
            here = board.room_tokens(sample.last_replica)
            if here >= need_tokens and board.room_tokens(best) < here + self.stay_tokens:
                best = sample.last_replica
        return best, memory


class RoundRobin(BaseModel):
    """The next replica in order of ids that has room; memory is the last one chosen."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["round_robin"] = "round_robin"
    sticky: ClassVar[bool] = False

    def choose(self, sample: SampleView, need_tokens: int, board: Board, memory: Any) -> tuple[str, Any]:
        replica_id = board.next_with_room(memory, need_tokens)
        return replica_id, replica_id


class Pinned(BaseModel):
    """Least KV for the first chunk; after that a sample stays where its KV is, and waits for room there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["pinned"] = "pinned"
    sticky: ClassVar[bool] = True

    def choose(self, sample: SampleView, need_tokens: int, board: Board, memory: Any) -> tuple[str, Any]:
        return board.roomiest(), memory


PlacementPolicy = Annotated[LeastKv | RoundRobin | Pinned, Field(discriminator="type")]
