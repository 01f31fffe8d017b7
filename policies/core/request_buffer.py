"""Request buffer: records of every batch, group and sample that has not been emitted yet.

Plain records, and `RequestBuffer`, which finds them. `RolloutCore` and its books write them. Invariant: a sample is in
exactly one state; its `generated_tokens` never shrinks and never exceeds `max_tokens`.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tailrace.policies.core.sample_states import WAITING
from tailrace.policies.protocol.events import ChunkFinished, GroupSpec, IllegalEvent, SampleReturned, SamplesSubmitted
from tailrace.policies.protocol.length_stats import BatchLengths
from tailrace.policies.protocol.views import BatchView, GroupView, LengthsView, SampleView

KNOWN_PROMPTS = 1_024
"""Maximum number of prompts whose lengths an open batch keeps after their groups have been emitted: it may stay open
for days.
"""


class Sample:
    __slots__ = ("accepted_tokens", "asked_nodes", "cancelled", "chunk_tokens", "chunks",
                 "expected_tokens", "first_version", "generated_tokens", "group", "hold_s", "home", "index",
                 "kept_version", "last_node", "last_replica", "max_tokens", "model_accepted", "model_tested",
                 "need_tokens", "observed_at", "outside_tokens", "sample_id", "state", "stored_tokens",
                 "stored_version", "streamed_tokens", "tested_tokens")  # fmt: skip

    def __init__(self, group: "Group", index: int, spec: GroupSpec):
        self.group, self.index, self.chunk_tokens = group, index, spec.chunk_tokens
        self.sample_id = f"{group.spec.group_id}#{index}"
        self.state = WAITING
        self.generated_tokens = self.streamed_tokens = self.chunks = 0
        self.max_tokens, self.hold_s = group.spec.max_tokens, spec.hold_s  # of its present turn
        self.outside_tokens = 0  # context tokens that came between its turns
        self.need_tokens = self.expected_tokens = 0  # the second is `LengthTracker`'s
        self.tested_tokens = self.accepted_tokens = 0  # draft tokens of its ended chunks
        self.model_tested = self.model_accepted = 0  # of these and of their copies: see `ChunkFinished`
        self.observed_at = 0.0
        self.last_replica: str | None = None
        self.last_node: str | None = None
        self.asked_nodes: tuple[str, ...] = ()  # nodes of prefetches since its last chunk
        self.first_version: int | None = None  # weights of its first chunk that made a token
        self.stored_tokens = 0  # context tokens in the pool; `KvTracker` alone writes these two
        self.stored_version: int | None = None  # version under which they are stored
        self.home: str | None = None  # the only replica it may run on, once bound
        self.kept_version: int | None = None  # older weights under which it is to continue, as of its last wait
        self.cancelled = False

    @property
    def context_tokens(self) -> int:
        return self.group.spec.prompt_tokens + self.outside_tokens + self.generated_tokens

    @property
    def place(self) -> str | int | None:
        """Its queue: older weights whose replicas alone may run it, else its home, or None for any replica."""
        return self.home if self.kept_version is None else self.kept_version

    def see(self, tokens: int, observed_at: float) -> bool:
        """Records the tokens that its chunk had made. Returns False for a late report, which changes nothing (law
        8).
        """
        if observed_at < self.observed_at:
            return False
        self.streamed_tokens, self.observed_at = max(self.streamed_tokens, tokens), observed_at
        return True

    def take(self, event: ChunkFinished, chunk: "Chunk") -> None:
        """Adds the tokens and draft counts of an ended chunk."""
        self.generated_tokens += event.new_tokens
        if chunk.method is None:  # copies draft by another method
            self.tested_tokens += event.tested_tokens
            self.accepted_tokens += event.accepted_tokens
        self.model_tested += event.model_tested
        self.model_accepted += event.model_accepted
        if self.first_version is None and event.new_tokens:
            self.first_version = chunk.weights_version

    def begin_turn(self, event: SampleReturned) -> None:
        self.outside_tokens += event.outside_tokens
        self.max_tokens, self.hold_s = self.generated_tokens + event.max_tokens, event.hold_s

    def view(self) -> SampleView:
        """Returns the sample's view. It is built by position, in a quarter of the time that keywords take, several
        times per decision.
        """
        group = self.group
        spec = group.spec
        return SampleView._make((
            self.sample_id, spec.group_id, group.arrival, self.index, spec.prompt_tokens + self.outside_tokens,
            self.generated_tokens, self.streamed_tokens, self.observed_at, self.max_tokens, self.chunks,
            self.last_replica, self.stored_tokens, self.expected_tokens,
        ))  # fmt: skip


class Group:
    __slots__ = ("arrival", "batch", "chunks", "class_starts", "expected_tokens", "finished_lengths", "home",
                 "lengths", "max_tokens", "position", "running", "samples", "spec", "unended")  # fmt: skip

    def __init__(self, spec: GroupSpec, batch: "Batch", arrival: int, position: int):
        """`position`: index among its batch's groups. `arrival`: number of groups that came before, in any batch."""
        self.spec, self.batch, self.position, self.arrival = spec, batch, position, arrival
        self.max_tokens = spec.max_tokens  # generated by one sample, in the turns so far
        self.samples = [Sample(self, index, spec) for index in range(spec.samples)]
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

    def known_lengths(self) -> tuple[tuple, tuple[int, ...]]:
        """Lengths of earlier answers by epoch, and of this group's own."""
        return self.spec.past_lengths, self.finished_lengths

    def extend(self, more: GroupSpec) -> list[Sample]:
        """Adds the samples of a later spec of an open group. Returns them."""
        first = self.spec.samples
        self.spec = replace(self.spec, samples=first + more.samples, open=more.open)
        added = [Sample(self, index, more) for index in range(first, self.spec.samples)]
        self.samples += added
        self.unended += len(added)
        return added

    def view(self) -> GroupView:
        """Returns the group's view, built by position as a sample's."""
        spec = self.spec
        return GroupView._make((
            spec.group_id, self.arrival, spec.samples, self.running, len(self.finished_lengths), self.chunks,
            self.max_tokens, self.expected_tokens,
        ))  # fmt: skip


class Batch:
    """A batch. `forgets`: it was open at first, and keeps only the lengths of groups that have been emitted."""

    __slots__ = ("arrival", "batch_id", "forgets", "groups", "is_open", "known_lengths", "lengths", "max_tokens",
                 "new_lengths", "positions", "priority", "running_tokens", "samples", "share", "step",
                 "unemitted")  # fmt: skip

    def __init__(self, event: SamplesSubmitted, arrivals: int):
        """`arrivals`: number of groups of all earlier batches."""
        self.batch_id, self.priority, self.share = event.batch_id, event.priority, event.share
        self.step, self.arrival = event.step, arrivals
        self.is_open = self.forgets = event.open
        self.groups: dict[str, Group] = {}  # by id, in order of arrival
        self.samples = self.unemitted = 0  # `unemitted`: groups not emitted yet
        self.positions = 0  # groups ever added
        self.max_tokens = 0  # maximum of any sample's first turn
        self.known_lengths = deque(maxlen=KNOWN_PROMPTS)  # past and finished lengths of removed groups
        self.lengths: BatchLengths | None = None  # `LengthTracker`'s; None before the first, and with greater answers
        self.new_lengths = 0  # `LengthTracker` alone writes it
        self.running_tokens = 0  # tokens of KV; `RunningChunks` alone writes it

    def add(self, spec: GroupSpec, arrival: int) -> Group:
        group = Group(spec, self, arrival, self.positions)
        self.groups[spec.group_id] = group
        self.positions += 1
        self.unemitted += 1
        self.samples += spec.samples
        if spec.max_tokens > self.max_tokens:
            self.max_tokens, self.lengths = spec.max_tokens, None
        return group

    def forget(self, group: Group) -> None:
        """Removes a group that has been emitted from the counts."""
        self.unemitted -= 1
        if self.forgets:
            del self.groups[group.spec.group_id]
            self.samples -= group.spec.samples
            self.known_lengths.append(group.known_lengths())

    def view(self) -> BatchView:
        return BatchView(self.batch_id, self.priority, self.share, self.running_tokens)


class Chunk:
    """A running piece of a sample. Its copies make its tokens on other replicas.

    The first of them to end counts as the chunk; at exactness `law` the original. The others are `beaten`, and their
    tokens do not count.
    """

    __slots__ = ("aborting", "beaten", "born", "chunk_id", "copied", "copies", "copy_of", "kv_tokens", "kv_version",
                 "listed_tokens", "max_tokens", "method", "replica_id", "sample", "weights_version")  # fmt: skip

    def __init__(
        self, chunk_id: str, sample: Sample, replica_id: str, max_tokens: int, weights_version: int, kv_version: int
    ):
        self.chunk_id, self.sample, self.replica_id = chunk_id, sample, replica_id
        self.max_tokens, self.weights_version, self.kv_version = max_tokens, weights_version, kv_version
        self.kv_tokens = sample.need_tokens  # tokens of KV that it reserves
        self.aborting = self.beaten = False
        self.listed_tokens = max_tokens  # tokens left to make, as `PrefetchPlanner` has recorded, which alone writes it
        self.born, self.copied = 0, ()  # `RunningChunks.turns` at its start; draft methods of all its copies ever
        self.copies: list[Chunk] = []
        self.copy_of: Chunk | None = None
        self.method: str | None = None  # draft method, or None for the replica's default


class RequestBuffer:
    """Every batch, until it is closed and all its groups are emitted; every sample by its id, until its group is."""

    def __init__(self):
        self.batches: dict[str, Batch] = {}
        self.samples: dict[str, Sample] = {}
        self.unended = 0  # samples of all batches
        self._arrivals = 0

    def check_new(self, event: SamplesSubmitted) -> None:
        """Checks a batch, or an addition to an open one. Raises IllegalEvent if its names are taken, or if its values
        differ from those of the open batch or group.
        """
        batch = self.batches.get(event.batch_id)
        if batch is None and not (event.groups or event.open):
            raise IllegalEvent(f"batch {event.batch_id!r} is empty")
        if batch is not None and not batch.is_open:
            raise IllegalEvent(f"batch {event.batch_id!r} is running already")
        if batch is not None and (batch.priority, batch.share, batch.step) != (event.priority, event.share, event.step):
            raise IllegalEvent(f"batch {event.batch_id!r} is open with another priority, share or step")
        for spec in event.groups:
            self._check_group(event, spec)

    def _check_group(self, event: SamplesSubmitted, spec: GroupSpec) -> None:
        group = self._group(spec.group_id)
        if spec.open and not event.open:
            raise IllegalEvent(f"group {spec.group_id!r} is open in batch {event.batch_id!r}, which is not")
        if group is None:
            if not spec.samples:
                raise IllegalEvent(f"{spec}: a new group has a sample at least")
            return
        if group.batch_id != event.batch_id or not group.spec.open:
            raise IllegalEvent(f"group {spec.group_id!r} is running already")
        sizes = (group.spec.prompt_tokens, group.spec.max_tokens, (), ())
        if (spec.prompt_tokens, spec.max_tokens, spec.past_lengths, spec.begun) != sizes:
            raise IllegalEvent(f"{spec}: group {spec.group_id!r} is open with {sizes[0]} and {sizes[1]} tokens")

    def new_ids(self, specs: Iterable[GroupSpec]) -> Iterator[str]:
        """Yields the ids of the samples that checked specs will add."""
        for spec in specs:
            group = self._group(spec.group_id)
            first = group.spec.samples if group else 0
            yield from (f"{spec.group_id}#{first + number}" for number in range(spec.samples))

    def _group(self, group_id: str) -> Group | None:
        first = self.samples.get(f"{group_id}#0")
        return first and first.group

    def admit(self, event: SamplesSubmitted) -> tuple[list[Group], list[Sample], list[Group]]:
        """Adds a checked event. Returns the new groups, samples added to open groups, and groups closed by it."""
        if event.batch_id not in self.batches:
            self.batches[event.batch_id] = Batch(event, self._arrivals)
        batch = self.batches[event.batch_id]
        new, added, closed = [], [], []
        for spec in event.groups:
            if (group := self._group(spec.group_id)) is None:
                group = batch.add(spec, self._arrivals)
                self._arrivals += 1
                new.append(group)
                self._count(group.samples)
            else:
                more = group.extend(spec)
                batch.samples += len(more)
                added += more
                closed += () if spec.open else (group,)
                self._count(more)
        if not event.open:
            closed += self.close(batch)
        return new, added, closed

    def _count(self, samples: list[Sample]) -> None:
        self.unended += len(samples)
        self.samples.update((sample.sample_id, sample) for sample in samples)

    def close(self, batch: Batch) -> list[Group]:
        """Closes a batch and its groups. Returns the groups that were open."""
        batch.is_open = False
        closed = [group for group in batch.groups.values() if group.spec.open]
        for group in closed:
            group.spec = replace(group.spec, open=False)
        return closed

    def batch(self, batch_id: str) -> Batch:
        if batch_id not in self.batches:
            raise IllegalEvent(f"batch {batch_id!r} is not here")
        return self.batches[batch_id]

    def sample(self, sample_id: str) -> Sample:
        if sample_id not in self.samples:
            raise IllegalEvent(f"sample {sample_id!r} is not here")
        return self.samples[sample_id]

    def forget(self, group: Group) -> None:
        """Removes a group that has been emitted."""
        for sample in group.samples:
            del self.samples[sample.sample_id]
        group.batch.forget(group)
