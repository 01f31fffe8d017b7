"""Lanes: samples sorted by expected remainder and cut into one run for each replica, so that all end together.

A few long samples share the first replica, whose steps are short; the crowd shares the last one. Without knowledge of
who is long, every replica pays its step's own time for the longest answer; with it, only the first ones do.

Contract: `plan` is a pure function; a plan gives every sample of the view a replica. `on` is False for a member
that never plans; `sees_truth` is True for the one that needs true lengths. Called by `LanePlanner`.
"""

from bisect import bisect_left
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.families.lengths import Belief
from tailrace.policies.models.lane_cost import LaneCost
from tailrace.policies.protocol.views import LanesView

CLOSE = 0.01
"""Share by which a plan's end may differ from the earliest: a step's measurement is no better."""

ROUGH = 0.02
"""The same for lanes that end before another one does in any case."""

ROUNDS = 12
"""Number of ends that are tried, at most; three are usual."""


class LanePlan(NamedTuple):
    """`replica`, int64[n]: index of each sample's replica. `end_s`: seconds until the last lane is expected to end;
    `stay_s`: the same if each sample stays where it is. `gain`: share of the rest that lanes are expected to save over
    like mixes on all replicas; 0 if the view has no drawn remainders.
    """

    replica: np.ndarray
    end_s: float
    stay_s: float
    gain: float


@runtime_checkable
class Lanes(Protocol):
    """A lanes policy, built in or the user's own. `every`: share of a plan's seconds after which it is renewed.
    `min_gain`: gain of a batch's first plan from which it has lanes, until it ends.
    """

    on: bool
    sees_truth: bool
    every: float
    min_gain: float
    belief: Belief

    def plan(self, view: LanesView) -> LanePlan:
        """Returns the plan."""


class NoLanes(BaseModel):
    """No lanes: a chunk may run on any replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["none"] = "none"
    on: ClassVar[bool] = False
    sees_truth: ClassVar[bool] = False
    every: ClassVar[float] = 1.0
    min_gain: ClassVar[float] = 1.0
    belief: ClassVar[Belief] = Belief()

    def plan(self, view: LanesView) -> LanePlan:
        return LanePlan(view.replica, 0.0, 0.0, 0.0)


class ByRemainder(BaseModel):
    """Base of lanes by sorted remainders."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file_keys: ClassVar[tuple[str, ...]] = ()
    on: ClassVar[bool] = True
    every: float = Field(0.025, gt=0.0, le=1.0, description="share of a plan's seconds after which it is renewed")
    bin_share: float = Field(0.3, gt=0.0, description="remainders that differ by less are exchangeable: they stay")

    def plan(self, view: LanesView) -> LanePlan:
        return planned_lanes(view, self.bin_share)


class AutoLanes(ByRemainder):
    """Lanes for batches that are expected to gain `min_gain`: history, mates or predictions tell who is long."""

    type: Literal["auto"] = "auto"
    sees_truth: ClassVar[bool] = False
    min_gain: float = Field(0.04, le=1.0, description="share of a batch's time that lanes must be expected to save")
    belief: Belief = Field(Belief(), description="what is believed of lengths")


class ClairvoyantLanes(ByRemainder):
    """Lanes by true lengths: the bound for every belief. Only if lengths are known: in simulation and replay."""

    type: Literal["clairvoyant"] = "clairvoyant"
    sees_truth: ClassVar[bool] = True
    min_gain: ClassVar[float] = float("-inf")
    belief: ClassVar[Belief] = Belief()


def planned_lanes(view: LanesView, bin_share: float) -> LanePlan:
    """Returns the plan of the module docstring. `bin_share`: remainders that differ by less are exchangeable."""
    cost = LaneCost(view.replicas, view.chance, view.max_drafts, view.reserved_tokens, float(view.context.mean()))
    key = np.maximum(view.left, view.left_high)
    wanted, rank = _cut(cost, key, view.left, view.context)
    place = np.empty(len(key), np.int64)
    place[rank] = np.arange(len(key))
    replica = settled(wanted, np.floor(np.log(key) / np.log1p(bin_share)), view.replica, place)
    here = np.where(view.replica >= 0, view.replica, replica)
    ends = (float(_ends_s(cost, at, view.left, key, view.context).max()) for at in (replica, here))
    return LanePlan(replica, *ends, _gain(view, cost) if len(view.drawn) else 0.0)


def _cut(cost: LaneCost, key: np.ndarray, left: np.ndarray, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the replica of each sample's lane, and the samples in the order of falling keys; both int64[n]."""
    order, rank = np.argsort(cost.speeds, kind="stable"), np.argsort(-key, kind="stable")
    cutter = Cutter(cost, key[rank], left[rank], context[rank], [cost.speeds[i] for i in order])
    wanted = np.empty(len(key), np.int64)
    wanted[rank] = order[np.repeat(np.arange(len(order)), np.diff(cutter.cuts()))]
    return wanted, rank


def _gain(view: LanesView, cost: LaneCost) -> float:
    """Returns the share of the rest that lanes by drawn remainders save over like mixes, times `told` squared.

    Of what perfect knowledge saves, correlations of 0.7 and 0.9 save 0 and a third in simulations, the squares of their
    shares 0.24 and 0.66: the square errs towards lanes where there is much to save.
    """
    saved = 0.0
    for drawn in view.drawn:
        planned, rank = _cut(cost, drawn, drawn, view.context)
        mixed = np.empty(len(drawn), np.int64)
        mixed[rank] = np.arange(len(drawn)) % len(view.replicas)
        ends = [_ends_s(cost, replica, drawn, drawn, view.context).max() for replica in (planned, mixed)]
        saved += 1.0 - ends[0] / ends[1]
    return float(view.told**2 * saved / len(view.drawn))


class Cutter:
    """Cuts samples, sorted by falling key, into runs for lanes of rising seconds (`speeds`)."""

    def __init__(self, cost: LaneCost, key: np.ndarray, left: np.ndarray, context: np.ndarray, speeds: list[float]):
        held = left * (context + 0.5 * left)
        self._cost, self._key, self._speeds = cost, key.tolist(), speeds
        self._left, self._held = np.cumsum(np.r_[0.0, left]).tolist(), np.cumsum(np.r_[0.0, held]).tolist()
        self.totals = self._left[-1], self._held[-1]
        self._sizes = [max(1, len(self._key) // len(speeds))] * len(speeds)  # of each lane at the end tried last
        self._slope = float("inf")  # seconds of one sample more, where looked last

    def seconds(self, lane: int, begin: int, end: int) -> float:
        """Returns the seconds of a lane of the samples from `begin` to before `end`."""
        if end <= begin:
            return 0.0
        total, held = self._left[end] - self._left[begin], self._held[end] - self._held[begin]
        return self._speeds[lane] * self._cost.seconds(self._key[begin], total, held, end - begin)

    def cuts(self) -> list[int]:
        """Returns the first sample of each lane, and the number of samples.

        First lanes whose single sample takes as long as all the rest do have no other.
        """
        count, lanes = len(self._key), len(self._speeds)
        several = range(min(count, lanes) - 1) if self._alone(0) else ()
        single = bisect_left(several, True, key=lambda n: not self._alone(n))
        return [*range(single), *self._best(single)]

    def _alone(self, lane: int) -> bool:
        """Returns whether the lanes from this one on end with its longest sample, if that has the lane for itself."""
        return self._fill(lane, self.seconds(lane, lane, lane + 1))[1] <= 0.0

    def _best(self, first: int) -> list[int]:
        """Returns the cuts of the lanes from `first` on that end together, each with as many samples as it can take."""
        lanes = len(self._speeds) - first
        low = self.seconds(first, first, first + 1)
        total, held = self.totals[0] - self._left[first], self.totals[1] - self._held[first]
        each = max(1, (len(self._key) - first) // lanes)
        high = max(low, self._cost.seconds(self._key[first], total / lanes, held / lanes, each))  # of like mixes
        close = CLOSE
        if first:  # the end is that of samples which have lanes for themselves: the others only share the rest evenly
            high, close = min(high, self.seconds(first - 1, first - 1, first)), ROUGH
        while (filled := self._fill(first, high))[1] > 0.0:
            low, high = high, high * 1.2
        (cuts, high_over), low_over = filled, 0.0  # not known yet
        for _ in range(ROUNDS):
            if high - low <= close * high or high_over >= -close * lanes * high:
                break
            middle = high + high_over / lanes  # as if each lane took its share of what is left over
            if low_over:
                middle = low + (high - low) * low_over / (low_over - high_over)
            middle = min(max(middle, 0.9 * low + 0.1 * high), 0.1 * low + 0.9 * high)
            found, over = self._fill(first, middle)
            if over > 0.0:
                low, low_over = middle, over
            else:
                cuts, high, high_over = found, middle, over
        return cuts

    def _fill(self, first: int, end_s: float) -> tuple[list[int], float]:
        """Returns the first sample of each lane from `first` on, and the number of samples; and by how many seconds the
        last lane, which takes all that is left, ends later than `end_s`, less those that short lanes have left.
        """
        count, lanes, begin, cuts, over = len(self._key), len(self._speeds), first, [first], 0.0
        for lane in range(first, lanes - 1):
            size = self._sizes[lane] = self._size(lane, begin, self._sizes[lane], end_s)
            most = max(1, count - begin - (lanes - 1 - lane))  # the others have one each, as far as there are
            if size >= most:
                size = most
                over += self.seconds(lane, begin, min(begin + size, count)) - end_s
            begin = min(begin + size, count)
            cuts.append(begin)
        last = self.seconds(lanes - 1, begin, count) - end_s
        return [*cuts, count], last if last > 0.0 else last + over

    def _size(self, lane: int, begin: int, size: int, end_s: float) -> int:
        """Returns the number of samples from `begin` on that a lane takes within `end_s`, 1 at least. The search begins
        at `size` and goes on where a line through the last two sizes, or with the lane before's slope, reaches `end_s`.
        """
        count = len(self._key) - begin
        if count < 2:
            return 1
        low, high = 1, count + 1  # one that fits, one that does not
        at, before, before_s = max(2, min(size, count)), 0, 0.0
        cost, speed, left, held = self._cost.seconds, self._speeds[lane], self._left, self._held
        longest, left_before, held_before = self._key[begin], left[begin], held[begin]
        for turn in range(count):
            if not low < at < high:
                break
            end = begin + at
            took_s = speed * cost(longest, left[end] - left_before, held[end] - held_before, at)
            if before and took_s != before_s:
                self._slope = (took_s - before_s) / (at - before)
            before, before_s = at, took_s
            step = int((end_s - took_s) / self._slope)
            if took_s <= end_s:
                low, at = at, at + step if step > 1 else at + 1
            else:
                high, at = at, at + step if step < -1 else at - 1
            if turn % 4 == 3:
                at = (low + high) // 2
            elif at <= low:
                at = low + 1
            elif at >= high:
                at = high - 1
        return low


def settled(wanted: np.ndarray, bins: np.ndarray, present: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Returns the replica of each sample, int64[n]: as many of a bin on each replica as `wanted` has, and those of the
    bin that are at a replica which needs some stay. `present`: -1 for samples without a replica; `place`: in the order.
    """
    count, replicas = len(wanted), int(max(wanted.max(), present.max())) + 1
    group = (bins - bins.min()).astype(np.int64) * replicas
    slots = int(group.max()) + replicas
    need = np.bincount(group + wanted, minlength=slots)
    here = np.where(present >= 0, group + present, -1)
    by_here = np.lexsort((place, here))
    sorted_here = here[by_here]
    first = np.searchsorted(sorted_here, sorted_here)
    stays = np.zeros(count, bool)
    stays[by_here] = (sorted_here >= 0) & (np.arange(count) - first < need[sorted_here])
    found = np.where(stays, present, -1)
    free = np.repeat(np.arange(slots), need - np.bincount(here[stays], minlength=slots))
    movers = np.flatnonzero(~stays)
    movers = movers[np.lexsort((place[movers], group[movers]))]
    found[movers] = free % replicas
    return found


def _ends_s(cost: LaneCost, replica: np.ndarray, left, longest, context: np.ndarray) -> np.ndarray:
    """Returns the seconds until each replica ends: f64[replicas]."""
    count = len(cost.speeds)
    total = np.bincount(replica, left, minlength=count).tolist()
    held = np.bincount(replica, left * (context + 0.5 * left), minlength=count).tolist()
    most = np.zeros(count)
    np.maximum.at(most, replica, longest)
    sizes = np.bincount(replica, minlength=count).tolist()
    return np.array([
        speed * cost.seconds(*sums) if sums[3] else 0.0
        for speed, *sums in zip(cost.speeds, most.tolist(), total, held, sizes, strict=True)
    ])  # fmt: skip


LanesPolicy = Annotated[NoLanes | AutoLanes | ClairvoyantLanes, Field(discriminator="type")]
