"""How many engine replicas a rollout keeps as its batch shrinks. `Scaling` asks, and sees to what follows.

Contract: `wanted` is a pure function of view and memory; memory is a value, None at first. What is wanted below the
replicas that are there is reached by closing those that Serve would stop first, which may still run chunks.
"""

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from policies.views import ReplicaView, TailView

KV_SHARE = 0.9
"""Of the KV of the replicas that stay, what consolidated chunks may reserve: reservations do not pack to the block."""


@runtime_checkable
class Tail(Protocol):
    """What the core asks of a tail policy, built in or the user's own."""

    def wanted(self, view: TailView, memory: Any) -> tuple[int, Any]: ...


class Hold(BaseModel):
    """All of them, whether they have work or not."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["hold"] = "hold"

    def wanted(self, view: TailView, memory: Any) -> tuple[int, Any]:
        return view.most, memory


class Shrinking(BaseModel):
    """Base of those that give replicas back: all of them as a batch comes or while samples wait; then what is needed,
    once more than that has not been for a while. It grows again only with the work: measured speeds are noisy.

    Memory is (replicas, since when they are the answer, samples that had not ended).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    after_s: float = Field(1.0, ge=0.0, description="how long the last answer stands before a smaller one replaces it")

    def wanted(self, view: TailView, memory: Any) -> tuple[int, Any]:
        answer, since, unended = memory or (view.least, view.now, 0)
        if not view.unended:
            needed = view.least
        elif view.waiting or view.unended > unended or not view.replicas:
            needed = view.most
        else:
            needed = min(answer, self.needed(view, answer))
        needed = min(max(needed, view.least), view.most)
        if needed >= answer or view.now - since >= self.after_s:
            answer, since = needed, view.now
        return answer, (answer, since, view.unended)

    def needed(self, view: TailView, answer: int) -> int:
        """While something runs and nothing waits; `answer` is the last one."""
        raise NotImplementedError


class Release(Shrinking):
    """Those that run something, and those that Serve would stop after them: no sample is moved."""

    type: Literal["release"] = "release"

    def needed(self, view: TailView, answer: int) -> int:
        if len(view.replicas) < answer:  # those still starting have had no chance to be busy
            return answer
        return max((place for place, replica in enumerate(view.replicas, start=1) if replica.running), default=1)


class Consolidate(Shrinking):
    """The fewest on which all that runs has room, and a step takes at most `max_slowdown` longer than on all."""

    type: Literal["consolidate"] = "consolidate"
    max_slowdown: float = Field(0.1, ge=0.0, description="by which share a decode step may get longer")

    def needed(self, view: TailView, answer: int) -> int:
        return fewest(view.replicas, view.running, view.most, self.max_slowdown)


class Threshold(Shrinking):
    """A fixed share of the replicas once few samples are left, as RollPacker's scale-down does."""

    type: Literal["threshold"] = "threshold"
    at_share: float = Field(0.2, ge=0.0, le=1.0, description="of the batches' samples: with fewer left it shrinks")
    to_share: float = Field(0.25, ge=0.0, le=1.0, description="of the replicas, which then stay")

    def needed(self, view: TailView, answer: int) -> int:
        few = view.unended < self.at_share * view.submitted
        return max(1, ceil(self.to_share * view.most)) if few else view.most


def fewest(replicas: Sequence[ReplicaView], running: int, most: int, max_slowdown: float) -> int:
    """Replicas that do for `running` chunks; `replicas` in the order in which they stay, of at most `most`.

    They have places and KV for all chunks, and a step of ceil(running / n) chunks takes at most 1 + max_slowdown times
    one of ceil(running / most), by the slowest speeds measured. `most` while nothing has been measured.
    """
    speeds = [replica.speeds for replica in replicas if replica.speeds is not None]
    if not speeds:
        return most
    longest_s = (1 + max_slowdown) * max(one.step_s(ceil(running / most)) for one in speeds)
    used = sum(replica.kv_capacity_tokens - replica.kv_free_tokens for replica in replicas)
    places = room = 0
    for count in range(1, most):
        replica = replicas[min(count, len(replicas)) - 1]  # those to come are taken to be like the last one
        places, room = places + replica.max_running, room + KV_SHARE * replica.kv_capacity_tokens
        fits = running <= places and used <= room
        if fits and max(one.step_s(ceil(running / count)) for one in speeds) <= longest_s:
            return count
    return most


TailPolicy = Annotated[Hold | Release | Consolidate | Threshold, Field(discriminator="type")]
