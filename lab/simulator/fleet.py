"""The replicas of a simulated cluster, and their reports to the core.

Invariant: a report holds only values that a real replica could have measured by then. Called by `Host`.
"""

from collections.abc import Callable, Iterable

from tailrace.lab.simulator.chunks import SimulatedChunk
from tailrace.lab.simulator.replica import ModelledReplica
from tailrace.lab.simulator.speculation import Speculation
from tailrace.lab.simulator.types import Cluster, Span
from tailrace.policies.core.replica_table import stop_order
from tailrace.policies.protocol.events import ReplicaJoined, ReplicaLeft, ReplicaMeasured
from tailrace.policies.protocol.performance import MethodAcceptance, Performance

BLOCK_TOKENS = 16
"""vLLM's default on GPUs."""

UNBOUNDED_TOKENS = 1 << 40
"""KV of a replica, as reported to a core that does not reserve any."""

MEASURE_S = 60.0
"""Seconds between two reports of a replica's performance, each of which costs an event: batches change over minutes."""


class ModelledFleet:
    """`cluster.replicas` modelled replicas, by id in `by_id`. `order`: those that are up, as they joined; `starting`:
    those that will be, each with the time in seconds.
    """

    def __init__(
        self, cluster: Cluster, speculation: Callable[[int], Speculation], spans: list[Span] | None,
        usual: tuple[MethodAcceptance, ...] = (),
    ):  # fmt: skip
        self.model, self._per_node, self._usual = cluster.replica, cluster.per_node, usual
        ways = [speculation(index) for index in range(cluster.replicas)]
        most = max(way.most for way in ways)
        self.draft_tokens = most + 1 if most else 0  # expectations overshoot a chunk's end by a fraction
        self.replicas = [ModelledReplica(self.model, index, way, spans) for index, way in enumerate(ways)]
        width = len(str(cluster.replicas))
        self._ids = [f"r{index:0{width}}" for index in range(cluster.replicas)]
        self.by_id = dict(zip(self._ids, self.replicas, strict=True))
        self._measured_s = [0.0] * cluster.replicas
        self.order: list[int] = []
        self.starting: dict[int, float] = {}
        self._stopping: dict[int, float] = {}  # until when, of those that went

    def occupying(self, now: float) -> int:
        """Returns the number of replicas that are up, start or stop."""
        stopping = [i for i, until_s in self._stopping.items() if until_s > now and i not in self.starting]
        return len(self.order) + len(self.starting) + len(stopping)

    def resize(self, wanted: int, now: float) -> tuple[list[int], list[ReplicaLeft]]:
        """Changes the number, as Serve would. Returns indexes of the replicas that are now in `starting`, and events of
        those that leave at once. Starts that are no longer wanted are cancelled first. A start in the place of a
        replica that stops begins once its GPUs are free.
        """
        while self.starting and len(self.order) + len(self.starting) > wanted:
            del self.starting[max(self.starting)]
        absent = (i for i in range(len(self.replicas)) if i not in self.order and i not in self.starting)
        free_s = {i: max(now, self._stopping.get(i, 0.0)) for i in absent}
        begin = sorted(free_s, key=free_s.get)[: max(0, wanted - len(self.order) - len(self.starting))]
        self.starting |= {i: free_s[i] + self.model.start_s for i in begin}
        leaving = stop_order({self._ids[i]: self._node(i) for i in self.order})[: max(0, len(self.order) - wanted)]
        for replica_id in leaving:
            replica = self.by_id[replica_id]
            replica.drop_kv()
            self.order.remove(replica.index)
            self._stopping[replica.index] = now + self.model.stop_s
        return begin, [ReplicaLeft(now, replica_id, "given back") for replica_id in leaving]

    def room_tokens(self) -> int:
        """Returns the context of the longest sample that a replica can hold."""
        return self.model.kv_capacity_tokens // BLOCK_TOKENS * BLOCK_TOKENS - self.draft_tokens

    def joins(self, indexes: Iterable[int], reserves: bool, now: float) -> list[ReplicaJoined | ReplicaMeasured]:
        """Lets these replicas be up from now on; `reserves`: the core is to stay within their KV and places."""
        joining = [self.replicas[index] for index in indexes]
        self.order += [replica.index for replica in joining]
        for replica in joining:
            self.starting.pop(replica.index, None)
        joins = [self._join(replica, 0, reserves, now) for replica in joining]
        return [*joins, *(self._measure(replica, now) for replica in joining)]

    def rejoins(self, replica: ModelledReplica, weights_version: int, reserves: bool, now: float) -> ReplicaJoined:
        """Lets a replica that is up join again after it has loaded other weights; none of its KV is read under them."""
        replica.prompts.clear()
        return self._join(replica, weights_version, reserves, now)

    def _join(self, replica: ModelledReplica, weights_version: int, reserves: bool, now: float) -> ReplicaJoined:
        tokens, running = self.model.kv_capacity_tokens, self.model.max_running
        if not reserves:
            tokens = running = UNBOUNDED_TOKENS
        return ReplicaJoined(
            now=now,
            replica_id=self._ids[replica.index],
            block_tokens=BLOCK_TOKENS,
            kv_capacity_blocks=tokens // BLOCK_TOKENS,
            max_running=running,
            draft_tokens=self.draft_tokens,
            weights_version=weights_version,
            node_id=self._node(replica.index),
            methods=replica.methods,
        )

    def _node(self, index: int) -> str:
        return f"n{index // self._per_node}"

    def measured(self, replica: ModelledReplica, now: float) -> list[ReplicaMeasured]:
        """Returns a report of its performance, if the last one is old."""
        if now < self._measured_s[replica.index] + MEASURE_S:
            return []
        self._measured_s[replica.index] = now
        return [self._measure(replica, now)]

    def _measure(self, replica: ModelledReplica, now: float) -> ReplicaMeasured:
        """Returns steps by tokens as the model has them; a chunk's own seconds are its share of the context read."""
        model, chunks = self.model, len(replica.running)
        drafts, made = replica.lately()
        most = model.max_running * (1 + self.draft_tokens)
        points = sorted({1 << power for power in range(most.bit_length())} | {most, most + 1})
        tokens_s = model.step.seconds(chunks * (1 + drafts), 0)
        performance = Performance(
            observed_at=now,
            step_tokens=tuple(map(float, points)),
            step_seconds=tuple(model.step.seconds(tokens, 0) for tokens in points),
            chunk_s=max(0.0, replica.step_s() - tokens_s) / chunks if chunks else 0.0,
            drafts=drafts,
            made=made,
            prefill_token_s=1 / model.prefill_tokens_s,
            fetch_base_s=model.fetch_base_s,
            fetch_token_s=1 / model.fetch_tokens_s if model.fetch_tokens_s else 0.0,
            acceptance=replica.acceptance() or self._usual,
            start_s=model.start_s,
            context_token_s=model.step.context_s,
            context_tokens=replica.context / chunks if chunks else 0.0,
        )
        return ReplicaMeasured(now, self._ids[replica.index], performance)

    def crowd(self, replica: ModelledReplica, now: float) -> list[ModelledReplica]:
        """Returns the replicas of this one's node that run something, after its turn: this may have begun or ended."""
        if self.model.alone_share == 1.0:
            return []
        first = replica.index // self._per_node * self._per_node
        busy = [mate for mate in self.replicas[first : first + self._per_node] if mate.running]
        for mate in busy:
            mate.take(self.model.alone_share if len(busy) == 1 else 1.0, now)
        return busy

    def load(self, now: float) -> tuple[int, int]:
        """Returns the chunks that run, and the tokens of KV that they hold."""
        running = sum(len(replica.running) for replica in self.replicas)
        return running, round(sum(replica.context_at(now) for replica in self.replicas))

    def bring(self, chunk: SimulatedChunk, min_pull_tokens: int | None, now: float) -> float:
        """Chooses the sources of the KV of a starting chunk's context: first KV that is still on its replica or shared
        with a mate; then the pool's, if worth a pull; the rest is computed. Returns the seconds of the pull.
        """
        sample, replica, model = chunk.sample, chunk.replica, self.model
        here = replica.cached(chunk.context - sample.fresh, sample.freed_kv, now)
        if sample.progress in replica.prompts:
            here = max(here, sample.progress.group.prompt_tokens)
        replica.prompts.add(sample.progress)
        here -= here % model.block_tokens
        gain = chunk.stored - chunk.stored % model.block_tokens - here
        if min_pull_tokens is not None and model.fetch_tokens_s and gain >= max(1, min_pull_tokens):
            chunk.pulled = gain
        chunk.prefill = chunk.context - here - chunk.pulled
        sample.recomputed += max(0, chunk.prefill - sample.fresh)
        return model.fetch_base_s + chunk.pulled / model.fetch_tokens_s if chunk.pulled else 0.0

    def save_s(self, chunk: SimulatedChunk) -> float:
        """Returns the seconds until the pool holds all KV of a chunk that has stopped, and its sample may continue."""
        return self.model.fetch_base_s + (chunk.context + int(chunk.made) - chunk.stored) / self.model.fetch_tokens_s
