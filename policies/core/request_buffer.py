"""Request buffer: records of every batch, group and sample that has not been handed out yet.

Plain records, and `RequestBuffer`, which finds them. `RolloutCore` and its books write them. Invariant: a sample is in
exactly one state; its `generated_tokens` never shrinks and never exceeds `max_tokens`.
"""

from enum import Enum

from tailrace.policies.protocol.events import ChunkFinished, GroupSpec, IllegalEvent, SamplesSubmitted
from tailrace.policies.protocol.length_stats import BatchLengths
from tailrace.policies.protocol.views import BatchView, GroupView, LengthsView, SampleView


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


WAITING, RUNNING, ENDED = State
"""Members by name: a lookup in the class takes a quarter of a microsecond, several times per event."""


class Sample:
    __slots__ = ("accepted_tokens", "asked_nodes", "cancelled", "chunks", "drafted_tokens",
                 "expected_tokens", "first_version", "generated_tokens", "group", "home", "index", "last_node",
                 "last_replica", "model_accepted", "model_tested", "need_tokens", "observed_at", "sample_id", "state",
                 "stored_tokens", "stored_version", "streamed_tokens")  # fmt: skip

    def __init__(self, group: "Group", index: int):
        self.group, self.index = group, index
        self.sample_id = f"{group.spec.group_id}#{index}"
        self.state = WAITING
        self.generated_tokens = self.streamed_tokens = self.chunks = 0
        self.need_tokens = self.expected_tokens = 0  # the second is `LengthTracker`'s
        self.drafted_tokens = self.accepted_tokens = 0  # of its chunks that have ended
        self.model_tested = self.model_accepted = 0  # of these and of their copies: see `ChunkFinished`
        self.observed_at = 0.0
        self.last_replica: str | None = None
        self.last_node: str | None = None
        self.asked_nodes: tuple[str, ...] = ()  # nodes of prefetches since its last chunk
        self.first_version: int | None = None  # weights of its first chunk that made a token
        self.stored_tokens = 0  # of its context, in the pool; `KvTracker` alone writes these two
        self.stored_version: int | None = None  # version under which they are stored
        self.home: str | None = None  # the only replica it may run on, once bound
        self.cancelled = False

    def see(self, tokens: int, observed_at: float) -> bool:
        """Note the tokens that its chunk had made. Returns False for a late report, which changes nothing (law 8)."""
        if observed_at < self.observed_at:
            return False
        self.streamed_tokens, self.observed_at = max(self.streamed_tokens, tokens), observed_at
        return True

    def take(self, event: ChunkFinished, chunk: "Chunk") -> None:
        """Add the tokens and draft counts of an ended chunk."""
        self.generated_tokens += event.new_tokens
        if chunk.method is None:  # copies draft by another method
            self.drafted_tokens += event.drafted_tokens
            self.accepted_tokens += event.accepted_tokens
        self.model_tested += event.model_tested
        self.model_accepted += event.model_accepted
        if self.first_version is None and event.new_tokens:
            self.first_version = chunk.weights_version

    def view(self) -> SampleView:
        """By position, which takes a quarter of the time that keywords take: this runs several times per decision."""
        group = self.group
        spec = group.spec
        return SampleView._make((
            self.sample_id, spec.group_id, group.arrival, self.index, spec.prompt_tokens, self.generated_tokens,
            self.streamed_tokens, self.observed_at, spec.max_tokens, self.chunks, self.last_replica,
            self.stored_tokens, self.expected_tokens,
        ))  # fmt: skip


class Group:
    __slots__ = ("arrival", "batch", "chunks", "class_starts", "expected_tokens", "finished_lengths", "home",
                 "lengths", "position", "running", "samples", "spec", "unended")  # fmt: skip

    def __init__(self, spec: GroupSpec, batch: "Batch", arrivals: int, position: int):
        """`position`: index among its batch's groups. `arrivals`: number of groups of all earlier batches."""
        self.spec, self.batch, self.position, self.arrival = spec, batch, position, arrivals + position
        self.samples = [Sample(self, index) for index in range(spec.samples)]
        for begun in spec.begun:
            self.samples[begun.index].generated_tokens = begun.tokens
        self.unended = spec.samples
        self.running = self.chunks = 0
        self.finished_lengths: tuple[int, ...] = ()  # sorted; `LengthTracker` alone writes these four
        self.expected_tokens, self.class_starts = spec.max_tokens, (0, 0)
        self.lengths: LengthsView | None = None  # as of its last finished sample
        self.home: str | None = None

    @property
    def batch_id(self) -> str:
        return self.batch.batch_id

    def view(self) -> GroupView:
        """By position, as of a sample."""
        spec = self.spec
        return GroupView._make((
            spec.group_id, self.arrival, spec.samples, self.running, len(self.finished_lengths), self.chunks,
            spec.max_tokens, self.expected_tokens,
        ))  # fmt: skip


class Batch:
    __slots__ = ("batch_id", "groups", "lengths", "new_lengths", "priority", "running_tokens", "samples", "share",
                 "step", "unemitted")  # fmt: skip

    def __init__(self, event: SamplesSubmitted, arrivals: int):
        """`arrivals`: number of groups of all earlier batches."""
        self.batch_id, self.priority, self.share = event.batch_id, event.priority, event.share
        self.step = event.step
        self.groups = [Group(spec, self, arrivals, position) for position, spec in enumerate(event.groups)]
        self.samples = sum(spec.samples for spec in event.groups)
        self.unemitted = len(self.groups)
        self.lengths: BatchLengths | None = None  # `LengthTracker` alone writes it and `new_lengths`
        self.new_lengths = 0
        self.running_tokens = 0  # of KV; `RunningChunks` alone writes it

    def view(self) -> BatchView:
        return BatchView(self.batch_id, self.priority, self.share, self.running_tokens)


class Chunk:
    """A running piece of a sample. Its copies make the same tokens on other replicas.

    The first of them to end counts as the chunk. The others are `beaten`, and their tokens do not count.
    """

    __slots__ = ("aborting", "beaten", "born", "chunk_id", "copies", "copy_of", "kv_tokens", "kv_version", "max_tokens",
                 "method", "replica_id", "sample", "weights_version")  # fmt: skip

    def __init__(
        self, chunk_id: str, sample: Sample, replica_id: str, max_tokens: int, weights_version: int, kv_version: int
    ):
        self.chunk_id, self.sample, self.replica_id = chunk_id, sample, replica_id
        self.max_tokens, self.weights_version, self.kv_version = max_tokens, weights_version, kv_version
        self.kv_tokens = sample.need_tokens  # that it reserves
        self.aborting = self.beaten = False
        self.born = 0  # `RunningChunks.turns` at its start
        self.copies: list[Chunk] = []
        self.copy_of: Chunk | None = None
        self.method: str | None = None  # draft method, or None for the replica's default


class RequestBuffer:
    """Every batch, and every sample by its id, until the last group of the batch has been handed out."""

    def __init__(self):
        self.batches: dict[str, Batch] = {}
        self.samples: dict[str, Sample] = {}
        self.unended = 0  # samples of all batches
        self._arrivals = 0

    def check_new(self, batch_id: str, specs: tuple[GroupSpec, ...]) -> None:
        """Check new names. Raises IllegalEvent if the batch or a group of this name is here already."""
        if batch_id in self.batches:
            raise IllegalEvent(f"batch {batch_id!r} is running already")
        for spec in specs:
            if f"{spec.group_id}#0" in self.samples:
                raise IllegalEvent(f"group {spec.group_id!r} is running already")

    def admit(self, event: SamplesSubmitted) -> list[Group]:
        self.batches[event.batch_id] = batch = Batch(event, self._arrivals)
        self._arrivals += len(batch.groups)
        self.unended += batch.samples
        self.samples.update((sample.sample_id, sample) for group in batch.groups for sample in group.samples)
        return batch.groups

    def batch(self, batch_id: str) -> Batch:
        if batch_id not in self.batches:
            raise IllegalEvent(f"batch {batch_id!r} is not here")
        return self.batches[batch_id]

    def forget(self, group: Group) -> None:
        """Forget a group that has been handed out."""
        for sample in group.samples:
            del self.samples[sample.sample_id]
        batch = self.batches[group.batch_id]
        batch.unemitted -= 1
        if not batch.unemitted:
            del self.batches[group.batch_id]
