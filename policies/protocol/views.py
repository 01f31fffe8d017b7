"""Views: the input of policies. Immutable; no field holds a sample's true length (law 3).

Fields that come from a replica's report carry the time of that report, `observed_at` (law 8); all
others are the core's own books and exact at the time of the decision.
"""

from typing import NamedTuple, Protocol

import numpy as np

from tailrace.policies.protocol.length_stats import BatchLengths
from tailrace.policies.protocol.performance import Performance
from tailrace.policies.protocol.step_cost import StepCost


class SampleView(NamedTuple):
    sample_id: str
    group_id: str
    arrival: int  # position of its group among all groups ever submitted
    index: int  # position in its group; 0 is the probe
    prompt_tokens: int  # context tokens that were not generated: the prompt, and tokens from outside between its turns
    generated_tokens: int  # tokens of all turns, at the end of its last chunk
    streamed_tokens: int  # seen so far of a running chunk, as of observed_at
    observed_at: float
    max_tokens: int  # generated tokens at which its present turn ends
    chunks: int  # chunks started so far
    last_replica: str | None
    stored_tokens: int = 0  # context tokens whose KV the pool held as its last chunk ended
    expected_tokens: int = 0  # length of the whole answer, by the `lengths` policy, as of its last wait or mate's end


class TrajectoryLoad(NamedTuple):
    """Active trajectories: those that have begun and not ended."""

    active: int
    context_tokens: int  # sum of their contexts, as of each one's last turn
    growth_tokens: float  # by which the context of one is expected to grow until it ends
    capacity_tokens: int  # of the pool, or of all replicas if that is more


class PromptView(NamedTuple):
    """A group of a new batch, for an ordering that binds whole batches."""

    group_id: str
    prompt_tokens: int
    samples: int
    past_lengths: tuple[tuple[int, ...], ...]  # lengths of earlier answers, one tuple per epoch, newest first


class GroupView(NamedTuple):
    group_id: str
    arrival: int
    samples: int
    running: int
    finished: int
    chunks: int  # chunks started so far, over all its samples
    max_tokens: int  # maximum over one sample's turns so far
    expected_tokens: int  # length of a whole answer, by the `lengths` policy, as of its last finished sample


class BatchView(NamedTuple):
    batch_id: str
    priority: int  # higher goes first
    share: float  # share of the cluster, relative to other batches; above 0
    running_tokens: int  # tokens of KV that its running chunks reserve, copies included


class LengthsView(NamedTuple):
    """Known lengths of a group's answers, in tokens."""

    finished: tuple[int, ...]  # sorted
    running: tuple[int, ...]  # tokens of each unfinished sample at the end of its last chunk; any order
    history: tuple[tuple[int, ...], ...]  # earlier answers to the prompt, by epoch, newest first
    batch: BatchLengths
    max_tokens: int


class BeliefView(NamedTuple):
    """Prompts with unended samples, and those samples: what beliefs over lengths rest on.

    Samples are in the order of their prompts.
    """

    level_mean: np.ndarray  # f64[groups]: normal score of each prompt's level, by history and predictions
    level_variance: np.ndarray  # f64[groups]: of that score, 1 if nothing is known
    finished: np.ndarray  # int64[f]: lengths of finished samples
    finished_group: np.ndarray  # int64[f]: index of their prompt
    group: np.ndarray  # int64[n]: index of each unended sample's prompt, rising
    made: np.ndarray  # int64[n]: its tokens so far, those streamed included
    max_tokens: np.ndarray  # int64[n]: at which it ends


class LaneReplica(NamedTuple):
    """A replica that can have a lane."""

    kv_tokens: int
    max_running: int
    performance: Performance | None  # None until the replica has reported any


class LanesView(NamedTuple):
    """All samples that wait or run, and the replicas that are ready."""

    now: float
    left: np.ndarray  # f64[n]: expected remainder in tokens, 1 at least
    left_high: np.ndarray  # f64[n]: a quantile of it
    drawn: np.ndarray  # f64[d, n]: what the remainders may turn out to be; none after a batch's first plan
    context: np.ndarray  # int64[n]: tokens of context
    replica: np.ndarray  # int64[n]: index of the replica that it runs on or has its lane on; -1 if none
    replicas: tuple[LaneReplica, ...]
    chance: float  # mean chance that a draft token is right if all before it are
    max_drafts: int  # draft tokens in a step, at most
    told: float  # share of the variance of lengths that history, predictions and mates tell, or are going to
    reserved_tokens: float  # KV that a running chunk reserves beyond its context, mean


class ReplicaView(NamedTuple):
    replica_id: str
    kv_capacity_tokens: int
    kv_free_tokens: int  # free for a new chunk's context, its tokens and its drafts
    running: int
    max_running: int
    weights_version: int
    node_id: str = ""
    performance: Performance | None = None  # None until the replica has reported any


class ReplicasView(Protocol):
    """The replicas that a placement sees: read-only, and current at the time of the decision."""

    def roomiest(self) -> str | None:
        """Returns the roomiest ready replica (ties: lowest id), or None if none has room."""

    def next_with_room(self, after: str | None, need_tokens: int) -> str | None:
        """Returns the first replica after `after`, in cyclic order of ids, with room for `need_tokens`, or None."""

    def ready(self) -> list[str]:
        """Returns the ids, in order, of the replicas that hold the current weights and are neither closing nor set
        aside.
        """

    def room_tokens(self, replica_id: str) -> int:
        """Returns the maximum number of tokens that a new chunk may need there; 0 if the replica is full, unknown,
        closing or set aside, or holds other weights.
        """

    def running(self, replica_id: str) -> int:
        """Returns the number of chunks that run there now."""

    def performance(self, replica_id: str) -> Performance | None:
        """Returns the replica's last measured performance, or None if it has not reported any."""


class RacesView(NamedTuple):
    """Expected gain of races on replicas with room. The default: races are off."""

    room: int = 0  # running chunks up to which a replica takes copies
    copies: int = 0  # max copies of a sample; 0 if no replica has room
    gain: float = 1.0  # expected mean speed-up of running samples with all copies


class DraftModelsView(NamedTuple):
    """Load of draft models, at a moment or in a planned split."""

    verified: int  # samples of one engine
    drafted: int  # samples of one draft model
    acceptance: float  # chance that a draft token is right if all earlier ones are; mean over samples
    performance: Performance | None = None  # of an engine that drafts; None until one has reported any


class RolesView(NamedTuple):
    """A split of replicas into engines and drafters. `gain`: expected speed-up over no draft models."""

    engines: int  # with room for all running chunks
    drafters: int
    gain: float


class TailView(NamedTuple):
    """The replicas and the rest of the batches in flight."""

    now: float
    waiting: int  # unended samples that do not run, held and paused ones included
    running: int  # samples that run; their copies do not count
    unended: int  # samples of the batches in flight
    submitted: int  # all samples of these batches
    replicas: tuple[ReplicaView, ...]  # Serve stops the last one first
    min_replicas: int  # limits of the configuration, raised by a reservation
    max_replicas: int
    races: RacesView = RacesView()
    roles: tuple[RolesView, ...] = ()  # splits with drafters that are expected to gain
    left_tokens: int = 0  # expected tokens of the longest running sample; 0: not computed
    move_s: float = 0.0  # mean seconds until a running chunk's KV is on another replica


class DraftView(NamedTuple):
    """The samples of one replica that the last engine step verified and that continue, one row each. K is the maximum
    length of a proposal.
    """

    right: np.ndarray  # float32[n, K]: chance that draft token j is right if all earlier ones are; 0 after the end
    proposed: np.ndarray  # int32[n]: length of the proposal
    match_tokens: np.ndarray  # int32[n]: longest context that the proposal rests on
    slot: np.ndarray  # int64[n]: index of the chunk's row; reused after the chunk has ended
    verifications: np.ndarray  # int64[n]: of this chunk so far; 0 if the slot is new
    drafted_last: np.ndarray  # int32[n]: draft tokens in the sample's previous verification
    accepted_last: np.ndarray  # int32[n]: accepted ones of those
    generated: np.ndarray  # int32[n]: answer tokens so far
    expected: np.ndarray  # int32[n]: length of the whole answer, as the chunk started (`StartChunk.expected_tokens`)
    medium_at: np.ndarray  # int32[n]: answer tokens from which it is of medium length (`StartChunk.class_starts`)
    long_at: np.ndarray  # int32[n]: answer tokens from which it is long
    acceptance: float  # chance that a draft token is right if all before it are, on this replica lately
    cost: StepCost
