"""`RolloutCore`: the decisions of a rollout as a state machine without I/O. Events in, actions out.

Laws kept here (each has a test): every sample ends exactly once and its tokens only grow; running chunks never
reserve more KV than a replica has; chunks start only under the current weights version, and others are stopped; a
waiting sample that fits on a ready replica starts at the next tick; what the pool holds is given up once, when
nobody needs it any more (`KvBook`); the same events give the same actions. One tick of a shell is
`core.observe(event)` for what has happened, `core.decide(Tick(now))`, then performing the actions in order.
The live coordinator and the simulator drive this same object. An illegal event raises and changes nothing.
"""

from policies import events as ev
from policies.actions import Action, EmitGroup, EndSample, SampleEnd, StartChunk
from policies.board import Board
from policies.buffer import ENDED, WAITING, Buffer, Chunk, Group, Sample
from policies.bundle import Policies, name_of
from policies.events import IllegalEvent
from policies.kvbook import KvBook
from policies.legal import check_finish, check_groups, check_join, check_measured, check_pool
from policies.lengthbook import LengthBook
from policies.running import Running
from policies.upcoming import Upcoming
from policies.waiting import Waiting

BY_ITSELF = (SampleEnd.STOP, SampleEnd.LENGTH)
MAX_ATTEMPTS = 5
"""Chunks of one sample that may fail in a row before it ends as failed: more is a poisoned sample, not bad luck."""


class RolloutCore:
    """See the module docstring. `policies` decide; `weights_version` is the version chunks start under."""

    def __init__(self, policies: Policies, weights_version: int = 0):
        self.policies = policies
        self.board = Board(weights_version)
        self._waiting = Waiting(policies.ordering)
        self._buffer = Buffer()
        self._lengths = LengthBook(policies, self._buffer)
        self._kv = KvBook(policies.kv_on_update, self.board)
        self._running = Running(self.board, self._kv)
        self._upcoming = Upcoming(policies.prefetch, self.board, self._waiting, self._running)
        self._outbox: list[Action] = []
        self._unbound: list[Group] = []  # not queued yet: no replica was ready to bind them to
        self._memory = None  # the placement policy's
        self._names = f"{name_of(policies.ordering)}, {name_of(policies.placement)}"

    # ---- observe ---------------------------------------------------------------------------------

    def observe(self, event: ev.Event) -> None:
        """Take in one event. Raises IllegalEvent, changing nothing, when it cannot have happened."""
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise IllegalEvent(f"not an event: {event!r}")
        handler(self, event)

    def _submitted(self, event: ev.SamplesSubmitted) -> None:
        check_groups(event)
        self._buffer.check_new(event.batch_id, event.groups)
        self._waiting.check_new(event.groups)
        groups = self._buffer.admit(event.batch_id, event.groups)
        self._lengths.admit(groups)
        self._unbound += groups

    def _revealed(self, event: ev.LengthsRevealed) -> None:
        self._waiting.reveal(event.lengths)

    def _cancelled(self, event: ev.BatchCancelled) -> None:
        batch = self._buffer.batch(event.batch_id)
        for sample in [s for group in batch.groups for s in group.samples if s.state is not ENDED]:
            sample.cancelled = True
            if sample.state is WAITING:
                self._end(sample, SampleEnd.CANCELLED, None, "batch cancelled")
        for chunk in self._running.chunks.values():
            if chunk.sample.group.batch_id == event.batch_id:
                self._running.abort(chunk, "batch cancelled")

    def _chunk_finished(self, event: ev.ChunkFinished) -> None:
        chunk = self._running.named(event.chunk_id)
        check_finish(event, chunk)
        sample = self._stop(chunk)
        sample.generated_tokens += event.new_tokens
        sample.attempts = 0
        if sample.first_version is None and event.new_tokens:
            sample.first_version = chunk.weights_version
        self._kv.store(chunk, event.stored_tokens)
        if event.end is ev.ChunkEnd.STOP:
            self._end(sample, SampleEnd.STOP, None, "stop token")
        elif sample.generated_tokens == sample.group.spec.max_tokens:
            self._end(sample, SampleEnd.LENGTH, None, "max_tokens of the sample")
        elif event.end is ev.ChunkEnd.LENGTH and event.new_tokens < chunk.max_tokens:
            self._end(sample, SampleEnd.LENGTH, None, "the model's context is used up")
        else:
            self._outbox += self._kv.release_stale(sample)
            self._wait_again(sample)

    def _chunk_failed(self, event: ev.ChunkFailed) -> None:
        self._failed(self._stop(self._running.named(event.chunk_id)), event.error)

    def _tokens_streamed(self, event: ev.TokensStreamed) -> None:
        chunk = self._running.named(event.chunk_id)
        sample = chunk.sample
        if event.observed_at >= sample.observed_at:  # a report that comes late makes a view no older (law 8)
            sample.streamed_tokens = max(sample.streamed_tokens, event.tokens)
            sample.observed_at = event.observed_at
            self._upcoming.seen(chunk)

    def _replica_joined(self, event: ev.ReplicaJoined) -> None:
        check_join(event)
        self.board.join(event)
        self._upcoming.rebuild()
        self._waiting.look_at(event.replica_id)

    def _replica_measured(self, event: ev.ReplicaMeasured) -> None:
        check_measured(event)
        self.board.measure(event)

    def _pool_reported(self, event: ev.PoolReported) -> None:
        check_pool(event)
        self._kv.report(event)

    def _kv_lost(self, event: ev.KvLost) -> None:
        self._kv.lose(event.sample_ids)

    def _replica_left(self, event: ev.ReplicaLeft) -> None:
        lost = self._running.lose(event.replica_id)
        for sample in self._waiting.evict(event.replica_id):
            self._queue(sample)
        for chunk in lost:
            self._failed(chunk.sample, f"replica {event.replica_id} left: {event.error}")

    def _weights_changed(self, event: ev.WeightsChanged) -> None:
        if event.version < self.board.weights_version:
            raise IllegalEvent(f"weights go back from {self.board.weights_version} to {event.version}")
        self.board.change_weights(event.version)
        self._outbox += self._kv.release_all_stale()
        for chunk in self._running.chunks.values():
            if chunk.weights_version != event.version:
                self._running.abort(chunk, f"weights {event.version} replace {chunk.weights_version}")
        for replica_id in self.board.ready():
            self._waiting.look_at(replica_id)

    # ---- decide ----------------------------------------------------------------------------------

    def decide(self, tick: ev.Tick) -> tuple[Action, ...]:
        """All actions due: ends and hand-outs since the last tick, then every chunk that can start now, then what the
        pool should give up or bring near for those that still wait."""
        self._outbox += self._running.aborts()
        if self._unbound and self.board.ready():
            self._bind()
        homes = self._waiting.homes()
        for home in homes:
            while (found := self._waiting.take_first(home, self.board.room_tokens(home))) is not None:
                self._place(found)
        while self._waiting and (roomiest := self.board.roomiest()) is not None:
            found = self._waiting.take_first(None, self.board.room_tokens(roomiest))
            if found is None:
                break
            self._place(found)
        if not self._running and self._waiting and self.board.all_ready():
            self._give_up()
        self._outbox += self._kv.make_room(tick.now, self._waiting)
        if not self.board.one_node:
            self._outbox += self._upcoming.prefetches(homes)
        actions, self._outbox = tuple(self._outbox), []
        return actions

    def _bind(self) -> None:
        """Queue the groups that waited for a ready replica; static orderings bind them to one now."""
        ready = self.board.ready()
        for group in [group for group in self._unbound if group.unended]:
            groups = len(self._buffer.batch(group.batch_id).groups)
            group.home = self.policies.ordering.bind(group.position, groups, ready)
            for sample in group.samples:
                if sample.state is WAITING:
                    sample.home = group.home
                    self._put(sample)
        self._unbound = []

    def _give_up(self) -> None:
        """All replicas are ready and idle: what waits never starts, unless it fits to the token (queues round up)."""
        waiting = self._waiting.samples()
        for sample in waiting:
            home = sample.home or self.board.roomiest()
            if home is not None and sample.need_tokens <= self.board.room_tokens(home):
                self._waiting.drop(sample)
                self._place(sample)
        for sample in waiting if not self._running else ():
            room = self.board.room_tokens(sample.home) if sample.home else self.board.capacity_tokens()
            error = f"its next chunk needs {sample.need_tokens} tokens of KV; the replica open to it has {room}"
            self._end(sample, SampleEnd.FAILED, error, "does not fit")

    def _place(self, sample: Sample) -> None:
        if sample.home is not None:
            self._start(sample, sample.home, f"bound to {sample.home}")
            return
        view = sample.view()
        replica_id, self._memory = self.policies.placement.choose(view, sample.need_tokens, self.board, self._memory)
        if self.policies.placement.sticky:
            sample.home = replica_id
        move = "first chunk"
        if view.last_replica is not None:
            move = "stays" if view.last_replica == replica_id else f"moves from {view.last_replica}"
        self._start(sample, replica_id, f"{self._names}: {move}")

    def _start(self, sample: Sample, replica_id: str, reason: str) -> None:
        chunk = self._running.start(sample, replica_id)
        self._upcoming.seen(chunk)
        pull = self.policies.placement.min_pull_tokens(self.board.speeds(replica_id))
        self._outbox.append(
            StartChunk(
                chunk.chunk_id, sample.sample_id, replica_id, sample.generated_tokens, chunk.max_tokens,
                chunk.weights_version, chunk.kv_version, pull, sample.expected_tokens, sample.group.class_starts,
                reason,
            )
        )  # fmt: skip

    # ---- transitions -----------------------------------------------------------------------------

    def _stop(self, chunk: Chunk) -> Sample:
        self._running.stop(chunk)
        self._waiting.look_at(chunk.replica_id)
        return chunk.sample

    def _failed(self, sample: Sample, error: str) -> None:
        sample.attempts += 1
        if sample.attempts < MAX_ATTEMPTS:
            self._wait_again(sample)
        else:
            error = f"{sample.attempts} chunks in a row failed; the last: {error}"
            self._end(sample, SampleEnd.FAILED, error, "given up")

    def _wait_again(self, sample: Sample) -> None:
        sample.state = WAITING
        if sample.cancelled:
            self._end(sample, SampleEnd.CANCELLED, None, "batch cancelled")
        else:
            self._queue(sample)

    def _queue(self, sample: Sample) -> None:
        """Queue a waiting sample; a group whose replica has left is bound anew, with all that waits of it."""
        group = sample.group
        if group.home is not None and group.home not in self.board:
            if group not in self._unbound:
                self._unbound.append(group)
            return
        if sample.home not in self.board:
            sample.home = group.home
        self._put(sample)

    def _put(self, sample: Sample) -> None:
        """Queue a waiting sample with the KV its next chunk needs: context and all tokens it may make."""
        self._lengths.queue(sample)
        view = sample.view()
        sample.need_tokens = view.prompt_tokens + view.generated_tokens + self.policies.chunking.tokens(view)
        self._waiting.put(sample, view)

    def _end(self, sample: Sample, end: SampleEnd, error: str | None, reason: str) -> None:
        self._waiting.drop(sample)
        sample.state = ENDED
        group = sample.group
        group.unended -= 1
        self._outbox.append(EndSample(sample.sample_id, end, error, reason))
        self._outbox += self._kv.end(sample)
        if end in BY_ITSELF:
            self._waiting.renew(group, self._lengths.finish(sample))
        if not group.unended:
            self._emit(group)

    def _emit(self, group: Group) -> None:
        self._outbox += self._kv.release_prompt(group)
        self._outbox.append(EmitGroup(group.batch_id, group.spec.group_id, "all samples have ended"))
        self._waiting.forget(group)
        self._buffer.forget(group)

    # ---- questions a shell asks -------------------------------------------------------------------

    def is_running(self, chunk_id: str) -> bool:
        return chunk_id in self._running.chunks

    def counts(self) -> dict[str, int]:
        """Samples that wait and run, and batches not handed out in full."""
        running = len(self._running)
        unended = sum(sample.state is not ENDED for sample in self._buffer.samples.values())
        return {"waiting": unended - running, "running": running, "batches": len(self._buffer.batches)}


_HANDLERS = {
    ev.SamplesSubmitted: RolloutCore._submitted,
    ev.LengthsRevealed: RolloutCore._revealed,
    ev.BatchCancelled: RolloutCore._cancelled,
    ev.ChunkFinished: RolloutCore._chunk_finished,
    ev.ChunkFailed: RolloutCore._chunk_failed,
    ev.TokensStreamed: RolloutCore._tokens_streamed,
    ev.ReplicaJoined: RolloutCore._replica_joined,
    ev.ReplicaLeft: RolloutCore._replica_left,
    ev.WeightsChanged: RolloutCore._weights_changed,
    ev.ReplicaMeasured: RolloutCore._replica_measured,
    ev.PoolReported: RolloutCore._pool_reported,
    ev.KvLost: RolloutCore._kv_lost,
}
