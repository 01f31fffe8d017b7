"""The request buffer: what the core knows of every sample and group that has not been handed out yet.

Plain records; `RolloutCore` alone writes them. Invariant: a sample is in exactly one state, its
`generated_tokens` never shrinks and never exceeds `max_tokens`.
"""

from enum import Enum

from policies.events import GroupSpec
from policies.views import GroupView, SampleView


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sample:
    __slots__ = ("attempts", "cancelled", "chunks", "generated_tokens", "group", "home", "index", "last_replica",
                 "need_tokens", "observed_at", "sample_id", "state", "streamed_tokens")  # fmt: skip

    def __init__(self, group: "Group", index: int):
        self.group, self.index = group, index
        self.sample_id = f"{group.spec.group_id}#{index}"
        self.state = State.WAITING
        self.generated_tokens = self.streamed_tokens = self.chunks = self.attempts = 0
        self.need_tokens = 0
        self.observed_at = 0.0
        self.last_replica: str | None = None
        self.home: str | None = None  # the only replica it may run on, once bound
        self.cancelled = False

    def view(self) -> SampleView:
        group = self.group
        return SampleView(
            self.sample_id, group.spec.group_id, group.arrival, self.index, group.spec.prompt_tokens,
            self.generated_tokens, self.streamed_tokens, self.observed_at, group.spec.max_tokens, self.chunks,
            self.last_replica,
        )  # fmt: skip


class Group:
    __slots__ = ("arrival", "batch_id", "chunks", "finished", "home", "longest_finished", "position", "running",
                 "samples", "spec", "unended")  # fmt: skip

    def __init__(self, spec: GroupSpec, batch_id: str, arrivals: int, position: int):
        """`position`: among its batch's groups; `arrivals`: groups of all batches before this one."""
        self.spec, self.batch_id, self.position, self.arrival = spec, batch_id, position, arrivals + position
        self.samples = [Sample(self, index) for index in range(spec.samples)]
        self.unended = spec.samples
        self.running = self.finished = self.chunks = 0
        self.longest_finished: int | None = None
        self.home: str | None = None

    def view(self) -> GroupView:
        return GroupView(
            self.spec.group_id, self.arrival, self.spec.samples, self.running, self.finished, self.chunks,
            self.spec.max_tokens, self.longest_finished,
        )  # fmt: skip


class Batch:
    __slots__ = ("batch_id", "groups", "unemitted")

    def __init__(self, batch_id: str, groups: list[Group]):
        self.batch_id, self.groups, self.unemitted = batch_id, groups, len(groups)


class Chunk:
    """A piece of a sample that runs now."""

    __slots__ = ("aborting", "chunk_id", "max_tokens", "replica_id", "sample", "weights_version")

    def __init__(self, chunk_id: str, sample: Sample, replica_id: str, max_tokens: int, weights_version: int):
        self.chunk_id, self.sample, self.replica_id = chunk_id, sample, replica_id
        self.max_tokens, self.weights_version = max_tokens, weights_version
        self.aborting = False
