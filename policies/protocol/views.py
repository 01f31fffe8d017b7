"""What a policy may see. Immutable; no field tells a sample's true length (law 3).

Fields that come from a replica's report carry the time of that report, `observed_at` (law 8); all
others are the core's own books and exact at the time of the decision.
"""

from typing import NamedTuple, Protocol

import numpy as np

from tailrace.policies.protocol.length_stats import BatchLengths
from tailrace.policies.protocol.step_cost import StepCost


class SampleView(NamedTuple):
    sample_id: str
    group_id: str
    arrival: int  # position of its group among all groups ever submitted
    index: int  # position in its group; 0 is the probe
    prompt_tokens: int
    generated_tokens: int  # at the end of its last chunk
    streamed_tokens: int  # seen so far of a running chunk, as of observed_at
    observed_at: float
    max_tokens: int
    chunks: int  # chunks started so far
    last_replica: str | None
    stored_tokens: int = 0  # of its context, whose KV the pool held as its last chunk ended
    expected_tokens: int = 0  # of the whole answer, by the `lengths` policy, since it waits or a mate has finished


class GroupView(NamedTuple):
    group_id: str
    arrival: int
    samples: int
    running: int
    finished: int
    chunks: int  # chunks started so far, over all its samples
    max_tokens: int
    expected_tokens: int  # of a whole answer, by the `lengths` policy, as of its last finished sample


class LengthsView(NamedTuple):
    """What is known of the lengths of a group's answers, in tokens."""

    finished: tuple[int, ...]  # sorted
    running: tuple[int, ...]  # made so far of each unfinished sample, at the end of its last chunk; any order
    history: tuple[tuple[int, ...], ...]  # earlier answers to the prompt, by epoch, newest first
    batch: BatchLengths
    max_tokens: int


class ReplicaSpeeds(NamedTuple):
    """What a replica measured by itself; a decode step takes step_base_s + step_per_chunk_s * chunks running, with as
    many draft tokens of each as lately."""

    prefill_tokens_s: float
    fetch_tokens_s: float  # KV from the pool, behind fetch_base_s; 0: it cannot fetch
    fetch_base_s: float
    step_base_s: float
    step_per_chunk_s: float
    observed_at: float

    def step_s(self, chunks: int) -> float:
        """Seconds of a decode step of so many chunks."""
        return self.step_base_s + self.step_per_chunk_s * chunks


class ReplicaView(NamedTuple):
    replica_id: str
    kv_capacity_tokens: int
    kv_free_tokens: int  # free for a new chunk's context, its tokens and its drafts
    running: int
    max_running: int
    weights_version: int
    node_id: str = ""
    speeds: ReplicaSpeeds | None = None  # None until the replica has reported any


class ReplicasView(Protocol):
    """The replicas as a placement sees them: read-only, and current at the time of the decision."""

    def roomiest(self) -> str | None:
        """The ready replica with the most room (ties: lowest id), or None if none has room."""

    def next_with_room(self, after: str | None, need_tokens: int) -> str | None:
        """The first replica after `after`, in cyclic order of ids, with room for `need_tokens`, or None."""

    def ready(self) -> list[str]:
        """Ids, in order, of the replicas that hold the current weights and are not closing."""

    def room_tokens(self, replica_id: str) -> int:
        """Max tokens that a new chunk may need there; 0 if the replica is full, unknown or holds other weights."""

    def running(self, replica_id: str) -> int:
        """Chunks that run there now."""

    def speeds(self, replica_id: str) -> ReplicaSpeeds | None:
        """The replica's last measured speeds, or None if it has not reported any."""


class RacesView(NamedTuple):
    """What races may bring where there is room; by default they are off."""

    room: int = 0  # chunks on a replica up to which it takes copies
    copies: int = 0  # that a sample may have; 0 as well where no replica has room
    gain: float = 1.0  # how many times as fast running samples are expected to be, on average, with all of them


class DraftModelsView(NamedTuple):
    """Draft models beside engines, at a moment or as they might be."""

    verified: int  # samples of one engine
    drafted: int  # samples of one draft model
    acceptance: float  # of a draft token, all before it being right: the mean of all samples


class RolesView(NamedTuple):
    """A way to use replicas: how many times as fast as without draft models what runs is expected to be then."""

    engines: int  # with room for all of it
    drafters: int
    gain: float


class TailView(NamedTuple):
    """The replicas, and what is left of the batches in flight."""

    now: float
    waiting: int  # samples that no replica has room for
    running: int  # chunks
    unended: int  # samples of the batches in flight
    submitted: int  # all samples of these batches
    replicas: tuple[ReplicaView, ...]  # in the order in which they stay: Serve stops the last one first
    min_replicas: int  # limits of the configuration, raised by a reservation
    max_replicas: int
    races: RacesView = RacesView()
    roles: tuple[RolesView, ...] = ()  # of what draft models might do, what is expected to gain


class DraftView(NamedTuple):
    """The samples of one replica that the engine step just over has verified and that continue, one row each; K is the
    longest proposal of a sample."""

    right: np.ndarray  # float32[n, K]: estimated chance that draft token j is right if those before it are; 0 behind
    proposed: np.ndarray  # int32[n]: draft tokens at hand
    match_tokens: np.ndarray  # int32[n]: longest context that the proposal rests on
    slot: np.ndarray  # int64[n]: small, the sample's while a chunk of it runs, another's afterwards
    verifications: np.ndarray  # int64[n]: of this chunk so far; 0: the slot has changed hands
    drafted_last: np.ndarray  # int32[n]: in the sample's previous verification
    accepted_last: np.ndarray  # int32[n]: of those
    generated: np.ndarray  # int32[n]: answer tokens so far
    expected: np.ndarray  # int32[n]: of the whole answer, as the chunk started (`StartChunk.expected_tokens`)
    medium_at: np.ndarray  # int32[n]: answer tokens from which it is no short one (`StartChunk.class_starts`)
    long_at: np.ndarray  # int32[n]: and from which it is a long one
    acceptance: float  # accepted share of what this replica drafted lately; a guess while it has drafted nothing
    cost: StepCost
