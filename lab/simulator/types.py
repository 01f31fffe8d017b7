"""Values between the simulator's parts: a workload with its truth, the model of a replica, a finished run.

Only a workload knows true lengths (law 3): the host passes on no more than the service would see. Seconds are of the
simulated clock, which starts at 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

TURN_MARK = "@"
"""Character between a sample's id and the number of a turn that is a separate request."""


class Gap(NamedTuple):
    """The gap between two turns of a sample: after `tokens` tokens of all turns so far a tool takes `tool_s` seconds,
    and `outside_tokens` of its answer come into the context.
    """

    tokens: int
    tool_s: float
    outside_tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadGroup:
    """A prompt, the true lengths of its samples in tokens (each 1 to max_tokens), and those of earlier epochs, newest
    first. `predictability` is how much likelier its drafts are right than the average group's, as a factor of the
    odds. `gaps`: of each sample, those between its turns; empty if each has one turn."""

    group_id: str
    prompt_tokens: int
    lengths: tuple[int, ...]
    past_lengths: tuple[tuple[int, ...], ...] = ()
    predictability: float = 1.0
    gaps: tuple[tuple[Gap, ...], ...] = ()

    @property
    def outside_tokens(self) -> int:
        """Returns the outside tokens of the sample with the most of them."""
        return max((sum(gap.outside_tokens for gap in gaps) for gaps in self.gaps), default=0)


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of rollout for each entry of `steps`, all of its groups submitted at once. `earlier`: prompts of a step
    before these, whose lengths the service has seen.
    """

    name: str
    max_tokens: int
    steps: tuple[tuple[WorkloadGroup, ...], ...]
    earlier: tuple[WorkloadGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class StepModel:
    """An engine step takes base_s + token_s * tokens computed + context_s * tokens of context read.

    A mixture of experts also reads the experts that its tokens choose: all of them take experts_s to read, and a token
    chooses expert_share of them, so t tokens read the share 1 - (1 - expert_share)^t (choices independent: assumed).
    """

    base_s: float
    token_s: float
    context_s: float
    experts_s: float = 0.0
    expert_share: float = 0.0

    def seconds(self, tokens: float, context_tokens: float) -> float:
        experts_s = self.experts_s * (1.0 - (1.0 - self.expert_share) ** tokens)
        return self.base_s + self.token_s * tokens + self.context_s * context_tokens + experts_s


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """One engine replica. KV capacity and rates count tokens of context; `gpus`: the number it occupies.

    Fetching n tokens of KV from the pool takes fetch_base_s + n / fetch_tokens_s (0: it cannot); prefill computes
    prefill_tokens_s. start_s pass until a replica that is wanted is up, stop_s until what one that went occupied is
    free. Between two chunks of a sample, a result and its consequences travel for handover_s, and joining takes
    join_s of the replica's time beyond the computation. KV is found again in whole blocks of block_tokens. While no
    other replica of its node runs anything, a step takes alone_share of its time.
    """

    step: StepModel
    kv_capacity_tokens: int
    max_running: int
    prefill_tokens_s: float
    fetch_tokens_s: float
    fetch_base_s: float
    start_s: float = 0.0
    stop_s: float = 0.0
    gpus: int = 1
    handover_s: float = 0.0
    join_s: float = 0.0
    block_tokens: int = 1
    alone_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """`replicas` of one model of replica. `per_node` of them share a node's part of the KV pool."""

    replica: ReplicaModel
    replicas: int
    per_node: int = 1


class Span(NamedTuple):
    """The activity of a replica for one sample without a break. role: generate, prefill, fetch, race, draft.
    `verifications`: the engine steps it took (0: not counted); the page's acceptance length over time needs them.
    `note`: a word on the reason, shown by a page; runs have few different ones."""

    replica: int
    sample_id: str
    role: str
    begin_s: float
    end_s: float
    tokens: int
    verifications: float = 0.0
    note: str = ""


class Ended(NamedTuple):
    """The outcome of one sample. `verifications`: engine steps it took part in; `drafted`, `accepted`: draft tokens.
    `returned_tokens`: context that had been computed before, as its later turns began, over these.
    """

    sample_id: str
    step: int
    tokens: int
    submitted_s: float
    ended_s: float
    chunks: int
    moves: int
    preemptions: int
    recomputed_tokens: int
    verifications: float
    drafted: float
    accepted: float
    turns: int = 1
    returned_tokens: int = 0


class Moment(NamedTuple):
    """The state of the cluster at `at_s`: samples running and waiting, KV tokens that running samples hold, replicas
    that occupy something: those that are up, start or stop.
    """

    at_s: float
    running: int
    waiting: int
    kv_tokens: int
    replicas: int


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A finished simulation. `moments` are sampled at changes; `spans` and `account` are empty unless requested."""

    system: str
    workload: str
    seed: int
    makespan_s: float
    ended: tuple[Ended, ...]
    moments: tuple[Moment, ...]
    spans: tuple[Span, ...]
    events: int
    bounds: dict[str, float]
    account: Mapping[str, float] = field(default_factory=dict)
