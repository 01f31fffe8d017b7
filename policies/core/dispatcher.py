"""Starts a sample's next chunk: books the placement policy's choice and returns it as an action with its reason.

Invariant: the replica has room for the chunk's whole reservation; a bound sample starts on its bound replica. Called by
`RolloutCore` alone.
"""

from tailrace.policies.core.draft_planner import DraftPlanner
from tailrace.policies.core.lane_planner import LanePlanner
from tailrace.policies.core.prefetch_planner import PrefetchPlanner
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.core.validation import WrongAnswer, checked_count
from tailrace.policies.families.registry import Policies, name_of
from tailrace.policies.protocol.actions import StartChunk
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.views import SampleView


class Dispatcher:
    def __init__(
        self,
        policies: Policies,
        table: ReplicaTable,
        running: RunningChunks,
        prefetch_planner: PrefetchPlanner,
        draft_planner: DraftPlanner,
        lanes: LanePlanner,
    ):
        self._placement, self._table, self._running = policies.placement, table, running
        self._prefetch_planner = prefetch_planner
        self._draft_planner, self._lanes = draft_planner, lanes
        self._memory = None  # the placement policy's
        self._names = f"{name_of(policies.ordering)}, {name_of(policies.placement)}"

    def place(self, sample: Sample) -> StartChunk:
        """Starts the sample's next chunk, of `sample.need_tokens`. A replica open to the sample must have that room."""
        if self._lanes.is_lane(sample):
            return self.start(sample, sample.home, f"its lane is to end at {self._lanes.end_s:.1f} s")
        if sample.home is not None:
            return self.start(sample, sample.home, f"bound to {sample.home}")
        view = sample.view()
        replica_id = self._choose(view, sample.need_tokens)
        if self._placement.sticky:
            sample.home = replica_id
        move = "first chunk"
        if view.last_replica is not None:
            move = "stays" if view.last_replica == replica_id else f"moves from {view.last_replica}"
        return self.start(sample, replica_id, f"{self._names}: {move}")

    def _choose(self, view: SampleView, need_tokens: int) -> str:
        replica_id, self._memory = self._placement.choose(view, need_tokens, self._table.read_only, self._memory)
        if replica_id not in self._table or self._table.room_tokens(replica_id) < need_tokens:
            wanted = f"the id of a ready replica with room for {need_tokens} tokens"
            raise WrongAnswer(self._placement, "choose", replica_id, wanted)
        return replica_id

    def start(self, sample: Sample, replica_id: str, reason: str) -> StartChunk:
        """Starts the sample's next chunk on a replica that has room for it."""
        chunk = self._running.start(sample, replica_id)
        self._prefetch_planner.started(chunk)
        return self.action(chunk, reason)

    def action(self, chunk: Chunk, reason: str) -> StartChunk:
        """Returns the action for a booked chunk.

        A copy races with its own method, as configured. A chunk without a draft model drafts by another method of its
        replica.
        """
        sample, original = chunk.sample, chunk.copy_of
        mode, why = self._draft_planner.next(sample, chunk.replica_id) if original is None else (None, "")
        methods = self._table.methods(chunk.replica_id)
        if mode is not None and not mode.window and DraftMethod.MODEL in methods:
            chunk.method = next((method for method in methods if method != DraftMethod.MODEL), None)
        reason = f"{reason}; {why}" if why else reason
        at = chunk.replica_id
        pull = self._placement.min_pull_tokens(self._table.performance(at), self._table.running(at))
        if pull is not None:
            pull = checked_count(self._placement, "min_pull_tokens", pull, 0)
        return StartChunk(
            chunk_id=chunk.chunk_id,
            sample_id=sample.sample_id,
            replica_id=chunk.replica_id,
            start=sample.generated_tokens,
            max_tokens=chunk.max_tokens,
            weights_version=chunk.weights_version,
            kv_version=chunk.kv_version,
            min_pull_tokens=pull,
            expected_tokens=sample.expected_tokens,
            class_starts=sample.group.class_starts,
            reason=reason,
            copy_of=original.chunk_id if original else None,
            method=chunk.method,
            way=mode,
        )
