"""The pool's books as events and actions alone tell them: what it holds of whom, under which version, and near whom.

Invariant: it asks the core nothing, so that what the core releases can be held against what was stored. Called by the
player of `rollout_machine` and by the laws of `test_kv_laws`.
"""

from dataclasses import dataclass, field

from tailrace.policies.protocol import events as ev
from tailrace.policies.protocol.actions import Action, Prefetch, ReleaseCause, ReleaseKv, StartChunk


def group_of(sample_id: str) -> str:
    return sample_id.rpartition("#")[0]


def new_samples(event: ev.SamplesSubmitted, known: dict[str, int]) -> dict[str, ev.GroupSpec]:
    """The samples of a submission, by sample_id. `known`: samples of each group so far, which are counted on here."""
    found = {}
    for spec in event.groups:
        first = known.get(spec.group_id, 0)
        known[spec.group_id] = first + spec.samples
        found |= {f"{spec.group_id}#{first + number}": spec for number in range(spec.samples)}
    return found


def begun_tokens(event: ev.SamplesSubmitted) -> dict[str, int]:
    """Tokens that samples have as they are submitted, by sample_id."""
    return {f"{spec.group_id}#{one.index}": one.tokens for spec in event.groups for one in spec.begun}


@dataclass
class KvLedger:
    keeps: bool  # whether samples keep their KV over an update
    version: int = 0
    running: dict[str, StartChunk] = field(default_factory=dict)
    specs: dict[str, ev.GroupSpec] = field(default_factory=dict)  # by sample_id
    known: dict[str, int] = field(default_factory=dict)  # samples by group
    tokens: dict[str, int] = field(default_factory=dict)  # generated, by sample_id
    outside: dict[str, int] = field(default_factory=dict)  # tokens between turns, by sample_id
    first: dict[str, int] = field(default_factory=dict)  # version of the first token, by sample_id
    held: dict[str, tuple[int, int]] = field(default_factory=dict)  # sample_id -> tokens stored last, their version
    groups: set[str] = field(default_factory=set)  # that ever stored
    due: list[str] = field(default_factory=list)  # samples whose KV has become stale since the last tick
    nodes: dict[str, str] = field(default_factory=dict)  # by replica
    last_node: dict[str, str] = field(default_factory=dict)  # by sample_id
    asked: set[tuple[str, str]] = field(default_factory=set)  # sample and node, since the sample's last chunk
    report: ev.PoolReported | None = None
    reported_at: float = float("-inf")
    evicted_at: float = float("-inf")

    def kv_version(self, sample_id: str, first: int | None = None) -> int:
        """What the policy says; `first` when the sample has no token yet, but is about to."""
        return self.first.get(sample_id, self.version if first is None else first) if self.keeps else self.version

    def own_tokens(self, sample_id: str) -> int:
        """What releasing a sample's own KV frees."""
        return max(0, self.held.get(sample_id, (0, 0))[0] - self.specs[sample_id].prompt_tokens)

    def context_tokens(self, sample_id: str) -> int:
        between = self.outside.get(sample_id, 0)
        return self.specs[sample_id].prompt_tokens + between + self.tokens.get(sample_id, 0)

    def too_full_by(self) -> float:
        """Tokens to give up at the next tick: from above 90 % of the pool down to 80 %; 0 without a new report."""
        report = self.report
        if report is None or report.observed_at <= self.evicted_at:
            return 0
        full = report.used_tokens > 0.9 * report.capacity_tokens
        return report.used_tokens - 0.8 * report.capacity_tokens if full else 0

    def note(self, event: ev.Event | ev.Tick, actions: tuple[Action, ...]) -> None:
        match event:
            case ev.SamplesSubmitted():
                self.specs |= new_samples(event, self.known)
                self.tokens |= begun_tokens(event)
            case ev.ReplicaJoined(replica_id=replica_id, node_id=node_id):
                self.nodes.setdefault(replica_id, node_id)
            case ev.ReplicaLeft(replica_id=replica_id):
                del self.nodes[replica_id]
                self.running = {i: start for i, start in self.running.items() if start.replica_id != replica_id}
            case ev.ChunkFailed(chunk_id=chunk_id):
                del self.running[chunk_id]
            case ev.SampleReturned(sample_id=sample_id):
                self.outside[sample_id] = self.outside.get(sample_id, 0) + event.outside_tokens
            case ev.ChunkFinished():
                self._finished(event)
            case ev.WeightsChanged(version=version):
                self.version = version
                self._outdate(list(self.held))
            case ev.KvLost():
                self._lost(event.sample_ids)
            case ev.PoolReported() if event.observed_at >= self.reported_at:
                self.report, self.reported_at = event, event.observed_at
            case ev.Tick(now=now):
                if any(isinstance(action, ReleaseKv) and action.cause is ReleaseCause.FULL for action in actions):
                    self.evicted_at = now
                self.report = None
        for action in actions:
            self._act(action)

    def _lost(self, sample_ids: tuple[str, ...] | None) -> None:
        if sample_ids is None:
            self.held, self.groups = {}, set()
        self.held = {i: held for i, held in self.held.items() if i not in (sample_ids or ())}

    def _finished(self, event: ev.ChunkFinished) -> None:
        start = self.running.pop(event.chunk_id)
        sample_id = start.sample_id
        self.tokens[sample_id] = self.tokens.get(sample_id, 0) + event.new_tokens
        if event.new_tokens:
            self.first.setdefault(sample_id, start.weights_version)
        if event.stored_tokens:
            self.held[sample_id] = (event.stored_tokens, start.kv_version)
            self.groups.add(group_of(sample_id))
            self._outdate([sample_id])
        elif sample_id in self.held:
            self.held[sample_id] = (0, self.held[sample_id][1])

    def _outdate(self, sample_ids: list[str]) -> None:
        for sample_id in sample_ids:
            if self.held[sample_id][1] != self.kv_version(sample_id):
                del self.held[sample_id]
                self.due.append(sample_id)

    def _act(self, action: Action) -> None:
        match action:
            case StartChunk(chunk_id=chunk_id, sample_id=sample_id, replica_id=replica_id):
                self.running[chunk_id] = action
                self.last_node[sample_id] = self.nodes[replica_id]
                self.asked = {(i, node) for i, node in self.asked if i != sample_id}
            case Prefetch(sample_id=sample_id, replica_id=replica_id):
                self.asked.add((sample_id, self.nodes[replica_id]))
            case ReleaseKv(group_id=group_id, sample_id=None):
                self.groups.remove(group_id)
            case ReleaseKv(sample_id=sample_id):
                if sample_id in self.due:
                    self.due.remove(sample_id)
                else:
                    del self.held[sample_id]  # a KeyError here is KV that was released twice, or never stored
