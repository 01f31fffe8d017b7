"""Tail policies: the number of engine replicas that a rollout keeps as its batch shrinks. Called by `Scaling`.

Contract: `wanted` is a pure function of view and memory; memory is a value, None at first. A smaller number is reached
by closing the replicas that Serve would stop first; they may still run chunks.
"""

from collections.abc import Sequence
from functools import cache
from math import ceil
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.protocol.performance import Performance
from tailrace.policies.protocol.views import ReplicaView, TailView

KV_SHARE = 0.9
"""Share of the remaining replicas' KV that consolidated chunks may reserve: reservations do not pack to the block."""


class ReplicaGoal(NamedTuple):
    """`drafters`: number of replicas of a draft model, which take the place of engines until the batch has ended."""

    engines: int
    drafters: int = 0


@runtime_checkable
class Tail(Protocol):
    """A tail policy, built in or the user's own.

    The configuration reads three capabilities, each a ClassVar[bool] that may be left out: `changes_replicas`
    (default True), `wants_drafters` (default False) and `may_want_drafters` (default False: with draft models planned).
    The core reads `counts_moves` (default False): only then a view has `left_tokens` and `move_s`.
    """

    def wanted(self, view: TailView, memory: Any) -> tuple[ReplicaGoal, Any]: ...


class Hold(BaseModel):
    """All replicas, whether they have work or not."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["hold"] = "hold"
    changes_replicas: ClassVar[bool] = False

    def wanted(self, view: TailView, memory: Any) -> tuple[ReplicaGoal, Any]:
        return ReplicaGoal(view.max_replicas), memory


class Shrinking(BaseModel):
    """Base of policies that give replicas back. Full size while samples wait; then `needed()`, once fewer have sufficed
    for `after_s`. The number grows again only with the work, since measured speeds are noisy: engines may become
    drafters or stop, drafters may stop.

    Memory is (the answer, the last time that no smaller one sufficed, samples that had not ended).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    file_keys: ClassVar[tuple[str, ...]] = ()
    after_s: float = Field(1.0, ge=0.0, description="seconds that an answer holds before a smaller one replaces it")

    def wanted(self, view: TailView, memory: Any) -> tuple[ReplicaGoal, Any]:
        answer, since, unended = memory or (ReplicaGoal(view.min_replicas), view.now, 0)
        if not view.unended:
            engines, drafters = view.min_replicas, 0
        elif view.waiting or view.unended > unended or not view.replicas:
            engines, drafters = view.max_replicas, 0
        else:
            engines, drafters = self.cut(view, answer)
            engines = min(engines, answer.engines)
            drafters = min(drafters, sum(answer) - engines)
        engines = min(max(engines, view.min_replicas), view.max_replicas)
        needed = ReplicaGoal(engines, min(drafters, view.max_replicas - engines))
        if needed == answer or needed.engines > answer.engines or view.now - since >= self.after_s:
            answer, since = needed, view.now
        return answer, (answer, since, view.unended)

    def cut(self, view: TailView, answer: ReplicaGoal) -> ReplicaGoal:
        """Returns the goal while something runs and nothing waits; `answer` is the last goal, which is never
        exceeded.
        """
        return ReplicaGoal(self.needed(view, answer.engines))

    def needed(self, view: TailView, answer: int) -> int:
        """Returns the same if no draft model is wanted."""
        raise NotImplementedError


class Release(Shrinking):
    """The replicas that run something, and those that Serve would stop after them: no sample is moved."""

    type: Literal["release"] = "release"

    def needed(self, view: TailView, answer: int) -> int:
        if len(view.replicas) < answer:  # those still starting have had no chance to be busy
            return answer
        return max((place for place, replica in enumerate(view.replicas, start=1) if replica.running), default=1)


class Consolidate(Shrinking):
    """The fewest replicas with room for all running chunks, at a step at most `max_slowdown` longer than on all."""

    type: Literal["consolidate"] = "consolidate"
    file_keys: ClassVar[tuple[str, ...]] = ()
    max_slowdown: float = Field(0.1, ge=0.0, description="by which share a decode step may get longer")

    def needed(self, view: TailView, answer: int) -> int:
        return fewest(view.replicas, view.running, view.max_replicas, self.max_slowdown)


class Draft(Consolidate):
    """Consolidate, and run draft models on the free replicas for the remaining samples (SpecActor 4.1)."""

    type: Literal["draft"] = "draft"
    wants_drafters: ClassVar[bool] = True

    def cut(self, view: TailView, answer: ReplicaGoal) -> ReplicaGoal:
        return ReplicaGoal(self.needed(view, answer.engines), view.max_replicas)


class Threshold(Shrinking):
    """A fixed share of the replicas once few samples are left, as RollPacker's scale-down does."""

    type: Literal["threshold"] = "threshold"
    at_share: float = Field(0.2, ge=0.0, le=1.0, description="of the batches' samples: with fewer left it shrinks")
    to_share: float = Field(0.25, ge=0.0, le=1.0, description="of the replicas, which then stay")

    def needed(self, view: TailView, answer: int) -> int:
        few = view.unended < self.at_share * view.submitted
        return max(1, ceil(self.to_share * view.max_replicas)) if few else view.max_replicas


class Auto(Shrinking):
    """The number that makes a remaining token cheapest: its seconds, and the replicas' worth elsewhere meanwhile.

    On n replicas a chunk's step takes as long as the mean of all, spread evenly, by the mean of the measured steps.
    Racing copies take free places, lengthen the step, and multiply the pace by the racing policy's expected gain. Draft
    models on other replicas multiply it by their policy's expected gain; races are then left out, since both gain from
    the same idle time. Samples continue side by side until the longest one's expected end. Two costs are added to that:
    a move, if chunks run on replicas that would go, and the time at the old pace until new draft models have started. A
    replica takes moved chunks, copies or drafts while that saves more of the makespan than its share of `worth`; else
    it is given back, unless to start it again for the next batch takes as long as this one will.
    """

    type: Literal["auto"] = "auto"
    file_keys: ClassVar[tuple[str, ...]] = ("worth",)
    may_want_drafters: ClassVar[bool] = True
    counts_moves: ClassVar[bool] = True
    worth: float = Field(0.1, ge=0.0, description="seconds of makespan that a second of all replicas is worth")

    def cut(self, view: TailView, answer: ReplicaGoal) -> ReplicaGoal:
        measured = [replica.performance for replica in view.replicas if replica.performance is not None]
        if not measured:
            return answer
        step = MeanStep(measured)
        least = roomy(view.replicas, view.running, view.max_replicas)
        paces = [(token_s(view, step, count), ReplicaGoal(count)) for count in range(least, view.max_replicas + 1)]
        paces += [
            (mean_s(step, view.running, one.engines) / one.gain, ReplicaGoal(one.engines, one.drafters))
            for one in view.roles
        ]
        rest = Rest(view, answer, measured, self.worth / view.max_replicas)
        plain_s = {goal.engines: took_s for took_s, goal in paces if not goal.drafters}
        return min(paces, key=lambda pace: rest.cost_s(*pace, plain_s.get(pace[1].engines, pace[0])))[1]


class Rest:
    """The rest of the batches in flight, to the longest sample's expected end. `worth`: worth of a second of one
    replica.

    If the view has no expected tokens, the rest is one step, without a move or a start.
    """

    def __init__(self, view: TailView, answer: ReplicaGoal, measured: Sequence[Performance], worth: float):
        self._view, self._answer, self._worth = view, answer, worth
        self._busy = max((place for place, one in enumerate(view.replicas, start=1) if one.running), default=0)
        self._steps = view.left_tokens * len(measured) / sum(one.made for one in measured) or 1.0
        self._start_s = sum(one.start_s for one in measured) / len(measured) if view.left_tokens else 0.0

    def cost_s(self, step_s: float, goal: ReplicaGoal, plain_s: float) -> float:
        """Returns the seconds to the end by steps of `step_s`, or `plain_s` while draft models start, plus the
        replicas' worth.
        """
        view, steps, wait_s = self._view, self._steps, 0.0
        if plain_s and goal.drafters > self._answer.drafters:
            wait_s = min(self._start_s, steps * plain_s)
            steps -= wait_s / plain_s
        until_s = (view.move_s if goal.engines < self._busy else 0.0) + wait_s + steps * step_s
        given_back = max(0, len(view.replicas) + self._answer.drafters - sum(goal))
        return until_s + self._worth * (sum(goal) * until_s + given_back * min(self._start_s, until_s))


class MeanStep:
    """Seconds of a step of some chunks, the mean over replicas; computed once for each number of chunks."""

    def __init__(self, measured: Sequence[Performance]):
        self._measured, self._known = measured, {}

    def __call__(self, chunks: int) -> float:
        if chunks not in self._known:
            self._known[chunks] = sum(one.step_s(chunks) for one in self._measured) / len(self._measured)
        return self._known[chunks]


def token_s(view: TailView, step: MeanStep, count: int) -> float:
    """Returns the seconds in which a sample makes as many tokens as one step makes without a race, on `count`
    replicas.
    """
    own, races = view.running, view.races
    places = min(races.room * count - own, min(races.copies, count - 1) * own)  # each copy is elsewhere
    if places <= 0:
        return mean_s(step, own, count)
    pace = 1 + (races.gain - 1) * places / (races.copies * own)
    return mean_s(step, own + places, count) / pace


def mean_s(step: MeanStep, chunks: int, replicas: int) -> float:
    """Returns the mean seconds of a step over all chunks, spread evenly."""
    each, more = divmod(chunks, replicas)
    fuller_s = more * (each + 1) * step(each + 1) if more else 0.0
    return (fuller_s + ((replicas - more) * each * step(each) if each else 0.0)) / chunks


def fewest(replicas: Sequence[ReplicaView], running: int, most: int, max_slowdown: float) -> int:
    """Returns the number of replicas that suffices for `running` chunks, at most `most`. `replicas`: Serve stops the
    last first.

    They have room for all chunks, and a step of ceil(running / n) chunks takes at most 1 + max_slowdown times one of
    ceil(running / most), by the slowest replica measured. `most` while nothing has been measured.
    """
    measured = [replica.performance for replica in replicas if replica.performance is not None]
    if not measured:
        return most
    slowest_s = cache(lambda chunks: max(one.step_s(chunks) for one in measured))
    longest_s = (1 + max_slowdown) * slowest_s(ceil(running / most))
    for count in range(roomy(replicas, running, most), most):
        if slowest_s(ceil(running / count)) <= longest_s:
            return count
    return most


def roomy(replicas: Sequence[ReplicaView], running: int, most: int) -> int:
    """Returns the smallest number of replicas with places and KV for all running chunks, at most `most`."""
    used = sum(replica.kv_capacity_tokens - replica.kv_free_tokens for replica in replicas)
    places = room = 0
    for count in range(1, most):
        replica = replicas[min(count, len(replicas)) - 1]  # later ones are assumed to be like the last one
        places, room = places + replica.max_running, room + KV_SHARE * replica.kv_capacity_tokens
        if running <= places and used <= room:
            return count
    return most


TailPolicy = Annotated[Hold | Release | Consolidate | Draft | Threshold | Auto, Field(discriminator="type")]
