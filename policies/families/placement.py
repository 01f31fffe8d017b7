"""Placements: where a chunk runs. A placement picks one replica with room; the core keeps its `memory`.

Contract: the replica returned is ready and has room for `need_tokens`; at least one such replica exists when
`choose` is called. `sticky` placements see a sample again only after its replica has left, closed or been set aside:
until then its later chunks go where the first one went.
`min_pull_tokens` is the number of tokens from which a replica of this performance (None: not measured yet), on which
`running` chunks are to run, should pull a sample's KV from the pool instead of computing it, or None for never.
"""

from typing import Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.performance import Performance
from tailrace.policies.protocol.views import ReplicasView, SampleView


@runtime_checkable
class Placement(Protocol):
    """The interface of a placement. `memory` is None at the first call."""

    sticky: bool

    def choose(self, sample: SampleView, need_tokens: int, replicas: ReplicasView, memory: Any) -> tuple[str, Any]: ...

    def min_pull_tokens(self, performance: Performance | None, running: int) -> int | None: ...


class EveryHit(BaseModel):
    """Base of placements that use no performance: whatever the pool holds is pulled."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file_keys: ClassVar[tuple[str, ...]] = ()
    sticky: ClassVar[bool] = False

    def min_pull_tokens(self, performance: Performance | None, running: int) -> int | None:
        return 1


class LeastKv(EveryHit):
    """Seer's rule: the replica with most free KV; a sample moves only if that gains `stay_tokens` of room."""

    type: Literal["least_kv"] = "least_kv"
    stay_tokens: int = Field(0, ge=0, description="KV room another replica must have more before a sample moves there")

    def choose(self, sample: SampleView, need_tokens: int, replicas: ReplicasView, memory: Any) -> tuple[str, Any]:
        best = replicas.roomiest()
        if self.stay_tokens and sample.last_replica is not None:
            here = replicas.room_tokens(sample.last_replica)
            if here >= need_tokens and replicas.room_tokens(best) < here + self.stay_tokens:
                best = sample.last_replica
        return best, memory


class RoundRobin(EveryHit):
    """The next replica in order of ids that has room; memory is the last one chosen."""

    type: Literal["round_robin"] = "round_robin"

    def choose(self, sample: SampleView, need_tokens: int, replicas: ReplicasView, memory: Any) -> tuple[str, Any]:
        replica_id = replicas.next_with_room(memory, need_tokens)
        return replica_id, replica_id


class FirstFit(EveryHit):
    """The first replica in order of ids with room and fewer than `chunks` running; without one, the roomiest.

    As a batch shrinks, its samples gather on few replicas, and others have cores for a trainer. O(replicas) a decision.
    """

    type: Literal["first_fit"] = "first_fit"
    chunks: int = Field(4, ge=1, description="running chunks from which a replica is passed over")

    def choose(self, sample: SampleView, need_tokens: int, replicas: ReplicasView, memory: Any) -> tuple[str, Any]:
        for replica_id in replicas.ready():
            if replicas.running(replica_id) < self.chunks and replicas.room_tokens(replica_id) >= need_tokens:
                return replica_id, memory
        return replicas.roomiest(), memory


class Pinned(EveryHit):
    """The replica with most free KV for the first chunk; later chunks stay with their KV and wait for room there."""

    type: Literal["pinned"] = "pinned"
    sticky: ClassVar[bool] = True

    def choose(self, sample: SampleView, need_tokens: int, replicas: ReplicasView, memory: Any) -> tuple[str, Any]:
        return replicas.roomiest(), memory


class CostAware(BaseModel):
    """The cheaper of the sample's last replica and the roomiest one, in seconds until its next chunk is done.

    cost_s = kv_s + new tokens / tokens that a chunk makes in a step there * seconds of a step with one chunk more. kv_s
    is 0 where it ran last, else it is for fetching the pool's part of its context and computing the rest, or for
    computing all, by `min_pull_tokens`. Until one of the two has measured a step, and the other one a prompt too, the
    sample stays if room here is at least half the room there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["cost_aware"] = "cost_aware"
    renew_s: ClassVar[float] = 60.0  # age of the last pull from which one is tried, however slow that was
    file_keys: ClassVar[tuple[str, ...]] = ()
    sticky: ClassVar[bool] = False
    min_gain_s: float = Field(0.05, ge=0.0, description="min seconds that a move must save")
    pull_from_tokens: int | None = Field(
        None, ge=0, description="min KV to pull from the pool; null: where computing it delays chunks by more seconds"
    )

    def choose(self, sample: SampleView, need_tokens: int, replicas: ReplicasView, memory: Any) -> tuple[str, Any]:
        here, there = sample.last_replica, replicas.roomiest()
        if here is None or here == there or replicas.room_tokens(here) < need_tokens:
            return there, memory
        ours, theirs = replicas.performance(here), replicas.performance(there)
        if ours is None or theirs is None or not theirs.prefill_token_s:
            return here if 2 * replicas.room_tokens(here) >= replicas.room_tokens(there) else there, memory
        new_tokens = need_tokens - sample.prompt_tokens - sample.generated_tokens
        stay_s = new_tokens * ours.token_s(replicas.running(here) + 1)
        running = replicas.running(there) + 1
        move_s = self._kv_s(sample, theirs, running) + new_tokens * theirs.token_s(running)
        return there if stay_s - move_s > self.min_gain_s else here, memory

    def min_pull_tokens(self, performance: Performance | None, running: int) -> int | None:
        """Returns the knob, or from where on computing, which delays all that run there, takes longer; 1 to measure."""
        if self.pull_from_tokens is not None:
            return self.pull_from_tokens
        if performance is None or not performance.prefill_token_s or performance.fetch_age_s > self.renew_s:
            return 1
        fetch_s, compute_s = performance.fetch_token_s, performance.prefill_token_s * max(1, running)
        if not 0 < fetch_s < compute_s:
            return None
        return 1 + int(performance.fetch_base_s / (compute_s - fetch_s))

    def _kv_s(self, sample: SampleView, there: Performance, running: int) -> float:
        """Returns the seconds until a replica of this performance, new to the sample, has the KV of its context."""
        context, stored = sample.prompt_tokens + sample.generated_tokens, sample.stored_tokens
        least = self.min_pull_tokens(there, running)
        if least is None or stored < max(1, least) or not there.fetch_token_s:
            return context * there.prefill_token_s
        return there.fetch_base_s + stored * there.fetch_token_s + (context - stored) * there.prefill_token_s


PlacementPolicy = Annotated[LeastKv | RoundRobin | FirstFit | Pinned | CostAware, Field(discriminator="type")]
