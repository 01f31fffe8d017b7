"""Fastest-of-N: which straggler also races with which draft method, and on which free replica (SpecActor 4.2).

Invariants: no worker takes more than its room, no sample gets a method twice or a copy on the replica it runs on, and
no copy is made that is expected to gain less than `min_gain`. A race changes the time only: copies make the same
tokens (law 2), or at exactness `law` they are drafts for the original. Pure and deterministic, ties by id. Called
whenever replicas become free.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tailrace.policies.models.spec_cost_model import verified
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import Performance, seconds_at


@dataclass(frozen=True, slots=True)
class MethodProfile:
    """A draft method: its speed-up over plain decoding at rising acceptance rates (`curve`: pairs of both, measured
    without the target by accepting at random), and the acceptance rates that samples had with it (`profile`)."""

    method: str
    curve: tuple[tuple[float, float], ...]
    profile: tuple[float, ...]

    def __post_init__(self) -> None:
        rates = [rate for rate, _ in self.curve]
        if not rates or not self.profile or any(later <= rate for rate, later in pairwise(rates)):
            raise ValueError(f"{self.method}: needs a profile, and a curve over rising acceptance rates")

    def speedup(self, acceptance: float) -> float:
        """Returns the speed-up at an acceptance: linear between points of the curve, constant beyond its ends."""
        above = bisect_right(self.curve, acceptance, key=lambda point: point[0])
        if above in (0, len(self.curve)):
            return self.curve[min(above, len(self.curve) - 1)][1]
        (low, slow), (high, fast) = self.curve[above - 1 : above + 1]
        return slow + (fast - slow) * (acceptance - low) / (high - low)

    def mean_acceptance(self) -> float:
        return sum(self.profile) / len(self.profile)

    def gain(self, speedup: float) -> float:
        """Returns the expected speed-up of a sample with this speed-up once it also races with this method.

        The mean over the profile of max(theirs, speedup) / speedup: at least 1, since the faster copy counts.
        """
        more = sum(max(self.speedup(acceptance) - speedup, 0.0) for acceptance in self.profile)
        return 1.0 + more / len(self.profile) / speedup


@dataclass(frozen=True, slots=True)
class MethodTable:
    """Draft methods with their gains. Raises ValueError if two have the same name."""

    rungs: tuple[MethodProfile, ...]

    def __post_init__(self) -> None:
        if len({rung.method for rung in self.rungs}) < len(self.rungs):
            raise ValueError("a draft method is named twice in the table")

    def ranked(self, acceptances: Mapping[str, float] | None = None) -> tuple[MethodProfile, ...]:
        """Returns the methods, fastest first, each at its mean acceptance: the given one, else its profile's."""
        means = {rung.method: rung.mean_acceptance() for rung in self.rungs} | dict(acceptances or {})
        return tuple(sorted(self.rungs, key=lambda rung: (-rung.speedup(means[rung.method]), rung.method)))

    def first_choice(self, acceptances: Mapping[str, float] | None = None) -> str | None:
        """Returns the best method for all samples at a step's start, or None if plain decoding is at least as fast."""
        means = acceptances or {}
        for rung in self.ranked(acceptances)[:1]:
            if rung.speedup(means.get(rung.method, rung.mean_acceptance())) > 1.0:
                return rung.method
        return None

    def speedup(self, method: str, acceptance: float) -> float:
        """Returns the speed-up over plain decoding; a method that the table lacks counts as plain decoding."""
        return next((rung.speedup(acceptance) for rung in self.rungs if rung.method == method), 1.0)

    def gain(self, own: str, acceptance: float) -> float:
        """Returns the expected speed-up of a sample that drafts by `own` once it races with all other methods."""
        alone = speedup = self.speedup(own, acceptance)
        for rung in self.others(own):
            speedup *= rung.gain(speedup)
        return speedup / alone

    def others(self, own: str) -> tuple[MethodProfile, ...]:
        """Returns the methods by rank, without `own`."""
        return tuple(rung for rung in self.ranked() if rung.method != own)

    def among(self, methods: Sequence[str]) -> "MethodTable":
        """Returns the table of these methods alone."""
        return MethodTable(tuple(rung for rung in self.rungs if rung.method in methods))


class Straggler(NamedTuple):
    """A sample that may race. `acceptance`: that of the first of its `methods`; a method that no table knows decodes
    plainly. `replica`: where it runs.
    """

    sample_id: str
    acceptance: float
    methods: tuple[str, ...]
    replica: str


class FreeWorker(NamedTuple):
    """A replica that can verify drafts of one method: `load` samples now, `room` at most (the paper's b_max)."""

    worker_id: str
    method: str
    load: int
    room: int


class Assignment(NamedTuple):
    sample_id: str
    method: str
    worker_id: str
    reason: str


@runtime_checkable
class Racing(Protocol):
    """The interface to the core. `room`: number of running chunks up to which a replica takes copies, 0 for no races.
    `usual`: acceptance of a method that no replica has measured. A policy may have a method `informed`: it returns the
    policy to use, given a replica's performance and the chance of each method's drafts (see `FastestOfN`).
    """

    room: int
    usual: float
    method_table: MethodTable

    def assign(self, stragglers: Sequence[Straggler], workers: Sequence[FreeWorker]) -> list[Assignment]: ...


class NoRacing(BaseModel):
    """No copies."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["off"] = "off"
    room: ClassVar[int] = 0
    usual: ClassVar[float] = 0.0
    method_table: ClassVar[MethodTable] = MethodTable(())

    def assign(self, stragglers: Sequence[Straggler], workers: Sequence[FreeWorker]) -> list[Assignment]:
        return []


USUAL = (
    MethodProfile(DraftMethod.GROUP, ((0.0, 1.0), (0.5, 1.7), (0.9, 4.0)), (0.5,)),
    MethodProfile(DraftMethod.MODEL, ((0.0, 0.9), (0.9, 3.0)), (0.5,)),
)
"""Guessed gains of the group's index and of a draft model, until their steps are measured."""

RATES, MOST_WINDOW = tuple(n / 20 for n in range(20)), 16
"""Points of a measured curve, and the longest window that is tried at each."""


def measured_curve(known: Performance, draft_s: float) -> tuple[tuple[float, float], ...]:
    """Returns gains over plain decoding of a sample alone, each at its best window, with drafts that take turns and
    `draft_s` a token.
    """
    plain_s = known.verify_s(1, 1)
    took_s = [w * draft_s + known.verify_s(1, 1 + w) for w in range(MOST_WINDOW + 1)]
    return tuple((p, max(verified(p, w + 1) * plain_s / one for w, one in enumerate(took_s))) for p in RATES)


def measured_rungs(known: Performance, chance_of: Callable[[str], float]) -> tuple[MethodProfile, ...]:
    """Returns the profiles of the group's index, whose drafts are free, and of a draft model; a guess for one that has
    not run.
    """
    group, model = USUAL
    curves = {group.method: measured_curve(known, 0.0), model.method: model.curve}
    if known.drafter_seconds:
        curves[model.method] = measured_curve(known, seconds_at(1, known.drafter_samples, known.drafter_seconds))
    return tuple(MethodProfile(method, curve, (chance_of(method),)) for method, curve in curves.items())


class FastestOfN(BaseModel):
    """Algorithm 3: the sample of lowest acceptance gets every method it lacks before the next sample gets any.

    Copies use methods that `rungs` lists and that replicas offer besides their default. Without `rungs` these are the
    group's index and a draft model; parts of the index, `history` and `ngram`, race only if `rungs` names them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["fastest_of_n"] = "fastest_of_n"
    file_keys: ClassVar[tuple[str, ...]] = ("rungs",)
    room: int = Field(2, ge=1, description="chunks on a replica up to which it takes copies (the paper's b_max)")
    usual: float = Field(0.5, ge=0.0, le=1.0, description="chance of a draft token, until replicas have tested some")
    rungs: tuple[MethodProfile, ...] | None = Field(
        None, min_length=1, description="gain of each method, as by `bench ladder --out`; null: as replicas measure it"
    )
    min_gain: float = Field(1.0, ge=1.0, description="speed a copy must be expected to multiply; 1: any, as published")

    @model_validator(mode="after")
    def _has_a_table(self):
        MethodTable(self.rungs or ())
        return self

    @property
    def method_table(self) -> MethodTable:
        return MethodTable(self.rungs or USUAL)

    def informed(self, known: Performance | None, chance_of: Callable[[str], float]) -> "FastestOfN":
        """Returns this policy with the measured gains of the index and of a draft model, unless it has its own."""
        if self.rungs is not None or known is None or not known.verify_s(1, 1):
            return self
        return self.model_copy(update={"rungs": measured_rungs(known, chance_of)})

    def assign(self, stragglers: Sequence[Straggler], workers: Sequence[FreeWorker]) -> list[Assignment]:
        """Returns the copies to start, in order. Methods by rank, workers by load. Costs O(log workers) each."""
        free: dict[str, list[tuple[int, str, int]]] = {}
        for worker in workers:
            if worker.load < worker.room:
                free.setdefault(worker.method, []).append((worker.load, worker.worker_id, worker.room))
        for heap in free.values():
            heapify(heap)
        rungs = [rung for rung in self.method_table.ranked() if rung.method in free]
        copies: list[Assignment] = []
        for sample in sorted(stragglers, key=lambda sample: (sample.acceptance, sample.sample_id)):
            copies += self._copies(sample, rungs, free)
        return copies

    def _copies(self, sample: Straggler, rungs: list[MethodProfile], free: dict) -> list[Assignment]:
        speedup = self.method_table.speedup(sample.methods[0], sample.acceptance) if sample.methods else 1.0
        copies = []
        for rung in rungs:
            gain = rung.gain(speedup)
            if rung.method in sample.methods or gain < self.min_gain:
                continue
            worker_id = _least_loaded(free[rung.method], sample.replica)
            if worker_id is not None:
                reason = f"accepts {sample.acceptance:.2f}; a race with {rung.method}: {gain:.2f} times as fast"
                copies.append(Assignment(sample.sample_id, rung.method, worker_id, reason))
                speedup *= gain
        return copies


def _least_loaded(heap: list[tuple[int, str, int]], but: str) -> str | None:
    """Takes a place on the worker with the fewest samples that has room and is not `but`. Returns its id, or None."""
    own = heappop(heap) if heap and heap[0][1] == but else None
    taken = None
    if heap:
        load, taken, room = heappop(heap)
        if load + 1 < room:
            heappush(heap, (load + 1, taken, room))
    if own:
        heappush(heap, own)
    return taken


RacingPolicy = Annotated[NoRacing | FastestOfN, Field(discriminator="type")]
