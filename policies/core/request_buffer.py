"""The request buffer: what the core knows of every sample and group that has not been handed out yet.

Plain records, and `RequestBuffer`, which finds them; `RolloutCore` and its books write them. Invariant: a sample is in
exactly one state, its `generated_tokens` never shrinks and never exceeds `max_tokens`.
"""

from enum import Enum

from tailrace.policies.protocol.events import ChunkFinished, GroupSpec, IllegalEvent
from tailrace.policies.protocol.length_stats import BatchLengths
from tailrace.policies.protocol.views import GroupView, LengthsView, SampleView


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


WAITING, RUNNING, ENDED = State
"""A member takes a quarter of a microsecond to look up in its class; the core would do so several times per event."""


class Sample:
    __slots__ = ("accepted_tokens", "asked_nodes", "attempts", "cancelled", "chunks", "drafted_tokens",
                 "expected_tokens", "first_version", "generated_tokens", "group", "home", "index", "last_node",
                 "last_replica", "model_accepted", "model_tested", "need_tokens", "observed_at", "sample_id", "state",
                 "stored_tokens", "stored_version", "streamed_tokens")  # fmt: skip

    def __init__(self, group: "Group", index: int):
        self.group, self.index = group, index
        self.sample_id = f"{group.spec.group_id}#{index}"
        self.state = WAITING
        self.generated_tokens = self.streamed_tokens = self.chunks = self.attempts = 0
        self.need_tokens = self.expected_tokens = 0  # the second is `LengthBook`'s
        self.drafted_tokens = self.accepted_tokens = 0  # of its chunks that have ended
        self.model_tested = self.model_accepted = 0  # of these, and copies of them: see `ChunkFinished`
        self.observed_at = 0.0
        self.last_replica: str | None = None
        self.last_node: str | None = None
        self.asked_nodes: tuple[str, ...] = ()  # where a prefetch since its last chunk was to bring its KV
        self.first_version: int | None = None  # weights of its first chunk that made a token
        self.stored_tokens = 0  # of its context, in the pool; `KvBook` alone writes these two
        self.stored_version: int | None = None  # the version under which they are stored
        self.home: str | None = None  # the only replica it may run on, once bound
        self.cancelled = False

    def see(self, tokens: int, observed_at: float) -> bool:
        """Its chunk had made so many. A report that comes late makes a view no older (law 8): False."""
        if observed_at < self.observed_at:
            return False
        self.streamed_tokens, self.observed_at = max(self.streamed_tokens, tokens), observed_at
        return True

    def take(self, event: ChunkFinished, chunk: "Chunk") -> None:
        """What its chunk has made is its own."""
        self.generated_tokens += event.new_tokens
        if chunk.method is None:  # copies draft by another method
            self.drafted_tokens += event.drafted_tokens
            self.accepted_tokens += event.accepted_tokens
        self.model_tested += event.model_tested
        self.model_accepted += event.model_accepted
        self.attempts = 0
        if self.first_version is None and event.new_tokens:
            self.first_version = chunk.weights_version

    def view(self) -> SampleView:
        group = self.group
        return SampleView(
            sample_id=self.sample_id,
            group_id=group.spec.group_id,
            arrival=group.arrival,
            index=self.index,
            prompt_tokens=group.spec.prompt_tokens,
            generated_tokens=self.generated_tokens,
            streamed_tokens=self.streamed_tokens,
            observed_at=self.observed_at,
            max_tokens=group.spec.max_tokens,
            chunks=self.chunks,
            last_replica=self.last_replica,
            stored_tokens=self.stored_tokens,
            expected_tokens=self.expected_tokens,
        )


class Group:
    __slots__ = ("arrival", "batch_id", "chunks", "class_starts", "expected_tokens", "finished_lengths", "home",
                 "lengths", "position", "running", "samples", "spec", "unended")  # fmt: skip

    def __init__(self, spec: GroupSpec, batch_id: str, arrivals: int, position: int):
        """`position`: among its batch's groups; `arrivals`: groups of all batches before this one."""
        self.spec, self.batch_id, self.position, self.arrival = spec, batch_id, position, arrivals + position
        self.samples = [Sample(self, index) for index in range(spec.samples)]
        self.unended = spec.samples
        self.running = self.chunks = 0
        self.finished_lengths: tuple[int, ...] = ()  # sorted; `LengthBook` alone writes these four
        self.expected_tokens, self.class_starts = spec.max_tokens, (0, 0)
        self.lengths: LengthsView | None = None  # as of its last finished sample
        self.home: str | None = None

    def view(self) -> GroupView:
        return GroupView(
            group_id=self.spec.group_id,
            arrival=self.arrival,
            samples=self.spec.samples,
            running=self.running,
            finished=len(self.finished_lengths),
            chunks=self.chunks,
            max_tokens=self.spec.max_tokens,
            expected_tokens=self.expected_tokens,
        )


class Batch:
    __slots__ = ("batch_id", "groups", "lengths", "new_lengths", "samples", "unemitted")

    def __init__(self, batch_id: str, groups: list[Group]):
        self.samples = sum(group.spec.samples for group in groups)
        self.batch_id, self.groups, self.unemitted = batch_id, groups, len(groups)
        self.lengths: BatchLengths | None = None  # `LengthBook` alone writes it, and how many it has not seen yet
        self.new_lengths = 0


class Chunk:
    """A piece of a sample that runs now. Copies of it make the same tokens elsewhere; the first of them to end is the
    chunk, and the others are `beaten`: nobody counts what they have made."""

    __slots__ = ("aborting", "beaten", "chunk_id", "copies", "copy_of", "kv_version", "max_tokens", "method",
                 "replica_id", "sample", "weights_version")  # fmt: skip

    def __init__(
        self, chunk_id: str, sample: Sample, replica_id: str, max_tokens: int, weights_version: int, kv_version: int
    ):
        self.chunk_id, self.sample, self.replica_id = chunk_id, sample, replica_id
        self.max_tokens, self.weights_version, self.kv_version = max_tokens, weights_version, kv_version
        self.aborting = self.beaten = False
        self.copies: list[Chunk] = []
        self.copy_of: Chunk | None = None
        self.method: str | None = None  # by which it drafts; None: as its replica does by itself


class RequestBuffer:
    """Every batch, and every sample by its id, until the last group of the batch has been handed out."""

    def __init__(self):
        self.batches: dict[str, Batch] = {}
        self.samples: dict[str, Sample] = {}
        self.unended = 0  # samples of all batches
        self._arrivals = 0

    def check_new(self, batch_id: str, specs: tuple[GroupSpec, ...]) -> None:
        """Raises IllegalEvent when the batch, or a group, of this name is here already."""
        if batch_id in self.batches:
            raise IllegalEvent(f"batch {batch_id!r} is running already")
        for spec in specs:
            if f"{spec.group_id}#0" in self.samples:
                raise IllegalEvent(f"group {spec.group_id!r} is running already")

    def admit(self, batch_id: str, specs: tuple[GroupSpec, ...]) -> list[Group]:
        groups = [Group(spec, batch_id, self._arrivals, position) for position, spec in enumerate(specs)]
        self._arrivals += len(groups)
        self.batches[batch_id] = batch = Batch(batch_id, groups)
        self.unended += batch.samples
        self.samples.update((sample.sample_id, sample) for group in groups for sample in group.samples)
        return groups

    def batch(self, batch_id: str) -> Batch:
        if batch_id not in self.batches:
            raise IllegalEvent(f"batch {batch_id!r} is not here")
        return self.batches[batch_id]

    def forget(self, group: Group) -> None:
        """The group has been handed out."""
        for sample in group.samples:
            del self.samples[sample.sample_id]
        batch = self.batches[group.batch_id]
        batch.unemitted -= 1
        if not batch.unemitted:
            del self.batches[group.batch_id]
