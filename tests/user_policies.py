"""Policies as a user writes them, named by dotted path in the tests. None has a `type`."""

from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.families.lanes import LanePlan
from tailrace.policies.families.lengths import Belief
from tailrace.policies.families.racing import Assignment, MethodProfile, MethodTable
from tailrace.policies.families.tail import ReplicaGoal
from tailrace.policies.protocol.actions import DraftMode


class LastComeFirst(BaseModel):
    """By arrival, backwards; every `spread`-th group of a batch is bound to a replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    lanes: ClassVar[int] = 1
    growing_lanes: ClassVar[tuple[int, ...]] = ()
    spread: int = Field(3, ge=1)

    def keys(self, sample, group):
        return ((-sample.arrival, -sample.index),)

    def lane(self, pick):
        return 0

    def bind(self, group, groups, replicas):
        return replicas[group % len(replicas)] if group % self.spread == 0 else None


class FewestFirst(LastComeFirst):
    """Who has the fewest tokens: everybody takes turns, so that most of what waits has run before."""

    def keys(self, sample, group):
        return ((sample.generated_tokens,),)

    def bind(self, group, groups, replicas):
        return None


class HighestId(BaseModel):
    """The last replica in order of ids that has room."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sticky: ClassVar[bool] = False

    def choose(self, sample, need_tokens, replicas, memory):
        return max(i for i in replicas.ready() if replicas.room_tokens(i) >= need_tokens), memory

    def min_pull_tokens(self, performance, running):
        return None


class Halving(BaseModel):
    """Half of what is left, at least one token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def tokens(self, sample):
        return max(1, (sample.max_tokens - sample.generated_tokens) // 2)


class KeepYoung(BaseModel):
    """KV is kept over so many updates, then computed again."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    updates: int = Field(1, ge=0)

    def kv_version(self, first_version, weights_version):
        return first_version if weights_version - first_version <= self.updates else weights_version


class HalfTheQueue(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def look_ahead(self, waiting):
        return (waiting + 1) // 2


class Doubling(BaseModel):
    """Twice as long as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    reads_all: ClassVar[bool] = False

    def expected(self, group, generated):
        return max(generated + 1, min(2 * generated, group.max_tokens))


class HalfADraft(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    reads_classes: ClassVar[bool] = False
    by_worth: ClassVar[bool] = False
    max_draft_tokens: int = Field(8, ge=0)

    def decide(self, view, memory):
        return (view.proposed.clip(max=self.max_draft_tokens) + 1) // 2, memory


class OneForEight(BaseModel):
    """A replica for so many samples, and a draft model beside them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    samples: int = Field(8, ge=1)

    def wanted(self, view, memory):
        engines = min(max(-(-view.unended // self.samples), view.min_replicas), view.max_replicas)
        return ReplicaGoal(engines, min(1, view.max_replicas - engines)), memory


class AlwaysTwo(BaseModel):
    """Two tokens ahead, for whoever is not worse than a coin."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    acceptance: float = Field(0.5, ge=0.0, le=1.0)
    replicas: ClassVar[int] = 1

    def way(self, view, acceptance):
        return DraftMode(2 * (acceptance >= 0.5), False), "always two"

    def gain(self, view):
        return 1 + view.acceptance


class NobodyTwice(BaseModel):
    """One copy, on the first free replica, of the first sample that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    own: ClassVar[str] = "group"
    usual: ClassVar[float] = 0.5
    method_table: ClassVar[MethodTable] = MethodTable((MethodProfile("model", ((0.0, 1.0),), (0.5,)),))
    room: int = Field(1, ge=1)

    def assign(self, stragglers, workers):
        alone = [one for one in stragglers if len(one.methods) == 1 and one.replica != workers[0].worker_id]
        return [Assignment(alone[0].sample_id, "model", workers[0].worker_id, "it has none")] if alone else []


class NotAPolicy(BaseModel):
    pass


NUMBER = 3


class LargestShare(BaseModel):
    """The batch with the largest share goes first."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    apart: bool = True

    def key(self, batch):
        return (-batch.share,)


class TakingTurns(BaseModel):
    """The n-th sample to the n-th replica, whatever is believed."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    on: ClassVar[bool] = True
    sees_truth: ClassVar[bool] = False
    min_gain: ClassVar[float] = 0.0
    belief: ClassVar[Belief] = Belief()
    every: float = Field(0.5, gt=0.0)

    def plan(self, view):
        return LanePlan(np.arange(len(view.left)) % len(view.replicas), 1.0, 2.0, 0.5)


class TwoAtOnce(BaseModel):
    """So many trajectories are active, whatever their contexts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    on: ClassVar[bool] = True
    most: int = 2

    def fits(self, load, context_tokens):
        return load.active < self.most

    def is_overfull(self, load):
        return False

    def keeps(self, left_s, back_s, waits):
        return not waits

    def gives_up(self, price_s, compute_s, active):
        return False

    def hold_s(self, expected_s):
        return 60.0
