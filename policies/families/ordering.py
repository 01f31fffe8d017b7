"""Orderings: which sample runs next. A waiting sample has one key per lane; the core takes the smallest that fits.

Contract: keys are tuples of numbers. A key may depend freely on its sample (which changes only while it does not wait),
on its group's finished samples, and on expected lengths (which change as one finishes). It may depend on anything else
of the group only in a lane named in `growing_lanes`, and only so that it grows as a step continues. The core renews
keys when a sample of the group finishes; in growing lanes it also checks the one that it is about to take. Lanes are
several orders over the same samples; `lane` gives the lane of the n-th decision. An ordering that binds whole batches
has `homes` (see `histo_pipe`), called in place of `bind` for the groups of a batch that need a replica.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from tailrace.policies.models.hashed_random import eight_fractions, fraction
from tailrace.policies.protocol.views import GroupView, SampleView


@runtime_checkable
class Ordering(Protocol):
    """The interface of an ordering, built in or the user's own."""

    lanes: int
    growing_lanes: tuple[int, ...]

    def keys(self, sample: SampleView, group: GroupView) -> tuple[tuple, ...]: ...

    def lane(self, pick: int) -> int: ...

    def bind(self, group: int, groups: int, replicas: Sequence[str]) -> str | None: ...


class OneLane(BaseModel):
    """Base of orderings with one lane whose samples may go anywhere."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file_keys: ClassVar[tuple[str, ...]] = ()
    lanes: ClassVar[int] = 1
    growing_lanes: ClassVar[tuple[int, ...]] = ()

    def lane(self, pick: int) -> int:
        return 0

    def bind(self, group: int, groups: int, replicas: Sequence[str]) -> str | None:
        """Returns the replica to which the `group`-th of a batch's `groups` groups is bound, or None if it may run
        anywhere.
        """
        return None


class Fcfs(OneLane):
    """First come, first served: by arrival of the group, then by sample."""

    type: Literal["fcfs"] = "fcfs"

    def keys(self, sample: SampleView, group: GroupView) -> tuple[tuple, ...]:
        return ((),)


class GroupStatic(Fcfs):
    """The baseline of verl: the batch is cut into equal runs of whole groups, one run per replica, up front."""

    type: Literal["group_static"] = "group_static"

    def bind(self, group: int, groups: int, replicas: Sequence[str]) -> str | None:
        return replicas[group * len(replicas) // groups]


class Seer(OneLane):
    """Seer 4.3, Algorithm 1: probes first, shortest first; then groups by greatest estimated length.

    L_g is the expected length of group g by the `lengths` policy: by its default, as in the paper, the greatest
    finished length, or max_tokens while none has finished. With probability `explore` a decision takes the group with
    the fewest chunks instead (the paper gives no rate). The draw depends on prompt and index alone, so runs of the same
    prompts compare under any batch name.
    """

    type: Literal["seer"] = "seer"
    lanes: ClassVar[int] = 2
    growing_lanes: ClassVar[tuple[int, ...]] = (1,)
    explore: float = Field(0.1, ge=0.0, le=1.0, description="share of decisions that go to the least-run groups")
    seed: int = Field(0, ge=0, description="of the digest that draws those decisions")

    def lane(self, pick: int) -> int:
        return int(eight_fractions(self.seed, pick >> 3)[pick & 7] < self.explore)

    def keys(self, sample: SampleView, group: GroupView) -> tuple[tuple, ...]:
        if sample.index == 0:
            probe = (0, sample.generated_tokens)
            return probe, probe
        key = (1, -group.expected_tokens, -sample.generated_tokens)
        return key, (1, group.chunks, fraction(self.seed, sample.sample_id.rpartition("/")[2]))


class RemainingFirst(OneLane):
    """Probes first, shortest first; then the sample with the longest expected remainder, by the `lengths` policy.

    A sample adds its remainder to the step, not its whole length. Each `patience`-th decision takes the sample that has
    run the fewest chunks instead. A sample that has run c chunks therefore waits for at most `patience` decisions per
    chunk that the samples before it in that order still lack: an estimate can delay a sample, and never starve it.
    """

    type: Literal["remaining_first"] = "remaining_first"
    lanes: ClassVar[int] = 2
    patience: int = Field(16, ge=2, description="each n-th decision goes to the sample that ran the fewest chunks")

    def lane(self, pick: int) -> int:
        return int(pick % self.patience == self.patience - 1)

    def keys(self, sample: SampleView, group: GroupView) -> tuple[tuple, ...]:
        least_run = (sample.chunks,)
        if sample.index == 0:
            return (0, sample.generated_tokens), least_run
        return (1, sample.generated_tokens - sample.expected_tokens), least_run


class OracleLongestFirst(OneLane):
    """True longest first: the bound for every estimate. Only if lengths are known: in simulation and replay."""

    type: Literal["oracle_longest_first"] = "oracle_longest_first"

    def keys(self, sample: SampleView, group: GroupView) -> tuple[tuple, ...]:
        raise TypeError("oracle_longest_first orders by lengths that only a simulation or a replay knows")

    def keys_of_length(self, sample: SampleView, lengths: Mapping[str, int]) -> tuple[tuple, ...]:
        return ((-lengths[sample.sample_id],),)


BuiltInOrdering = Fcfs | GroupStatic | Seer | RemainingFirst | OracleLongestFirst
