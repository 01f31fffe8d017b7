"""`RolloutCore`: the decisions of a rollout as a state machine without I/O. Events in, actions out.

Laws kept here (each has a test): every sample ends exactly once and its tokens only grow; running chunks never
reserve more KV than a replica has; chunks start only under the current weights version; a waiting sample that
fits on a ready replica starts at the next tick; the same events give the same actions. One tick of a shell is
`core.observe(event)` for what has happened, `core.decide(Tick(now))`, then performing the actions in order.
The live coordinator and the simulator drive this same object. An illegal event raises and changes nothing.
"""

from policies import events as ev
from policies.actions import AbortChunk, Action, EmitGroup, EndSample, SampleEnd, StartChunk
from policies.board import Board
from policies.buffer import Batch, Chunk, Group, Sample, State
from policies.bundle import Policies, name_of
from policies.legal import IllegalEvent, check_finish, check_groups, check_join
from policies.waiting import Waiting

MAX_ATTEMPTS = 5
"""Chunks of one sample that may fail in a row before it ends as failed: more is a poisoned sample, not bad luck."""


class RolloutCore:
    """See the module docstring. `policies` decide; `weights_version` is the version chunks start under."""

    def __init__(self, policies: Policies, weights_version: int = 0):
        self.policies = policies
        self.board = Board(weights_version)
        self._waiting = Waiting(policies.ordering)
        self._batches: dict[str, Batch] = {}
        self._samples: dict[str, Sample] = {}
        self._chunks: dict[str, Chunk] = {}
        self._outbox: list[Action] = []
        self._aborts: list[Chunk] = []
        self._unbound: list[Group] = []  # not queued yet: no replica was ready to bind them to
        self._arrivals = 0
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
        if event.batch_id in self._batches:
            raise IllegalEvent(f"batch {event.batch_id!r} is running already")
        check_groups(event)
        for spec in event.groups:
            if f"{spec.group_id}#0" in self._samples:
                raise IllegalEvent(f"group {spec.group_id!r} is running already")
            if not self._waiting.may_order(spec):
                raise IllegalEvent(f"{spec.group_id}: {name_of(self.policies.ordering)} needs true lengths, has none")
        groups = [Group(spec, event.batch_id, self._arrivals, i) for i, spec in enumerate(event.groups)]
        self._arrivals += len(groups)
        self._batches[event.batch_id] = Batch(event.batch_id, groups)
        self._samples.update((sample.sample_id, sample) for group in groups for sample in group.samples)
        self._unbound += groups

    def _revealed(self, event: ev.LengthsRevealed) -> None:
        try:
            self._waiting.reveal(event.lengths)
        except TypeError as error:
            raise IllegalEvent(str(error)) from error

    def _cancelled(self, event: ev.BatchCancelled) -> None:
        batch = self._batch(event.batch_id)
        for sample in [s for group in batch.groups for s in group.samples if s.state is not State.ENDED]:
            sample.cancelled = True
            if sample.state is State.WAITING:
                self._end(sample, SampleEnd.CANCELLED, None, "batch cancelled")
        for chunk in self._chunks.values():
            if chunk.sample.group.batch_id == event.batch_id and not chunk.aborting:
                chunk.aborting = True
                self._aborts.append(chunk)

    def _chunk_finished(self, event: ev.ChunkFinished) -> None:
        chunk = self._chunk(event.chunk_id)
        check_finish(event, chunk)
        sample = self._stop(chunk)
        sample.generated_tokens += event.new_tokens
        sample.attempts = 0
        if event.end is ev.ChunkEnd.STOP:
            self._end(sample, SampleEnd.STOP, None, "stop token")
        elif sample.generated_tokens == sample.group.spec.max_tokens:
            self._end(sample, SampleEnd.LENGTH, None, "max_tokens of the sample")
        elif event.end is ev.ChunkEnd.LENGTH and event.new_tokens < chunk.max_tokens:
            self._end(sample, SampleEnd.LENGTH, None, "the model's context is used up")
        else:
            self._wait_again(sample)

    def _chunk_failed(self, event: ev.ChunkFailed) -> None:
        chunk = self._chunk(event.chunk_id)
        self._failed(self._stop(chunk), event.error)

    def _tokens_streamed(self, event: ev.TokensStreamed) -> None:
        sample = self._chunk(event.chunk_id).sample
        if event.observed_at >= sample.observed_at:  # a report that comes late makes a view no older (law 8)
            sample.streamed_tokens = max(sample.streamed_tokens, event.tokens)
            sample.observed_at = event.observed_at

    def _replica_joined(self, event: ev.ReplicaJoined) -> None:
        check_join(event)
        self.board.join(event)
        self._waiting.look_at(event.replica_id)

    def _replica_left(self, event: ev.ReplicaLeft) -> None:
        if event.replica_id not in self.board:
            raise IllegalEvent(f"replica {event.replica_id!r} is not here")
        lost = [self._chunks.pop(chunk_id) for chunk_id in self.board.leave(event.replica_id)]
        for chunk in lost:
            chunk.sample.group.running -= 1
        for sample in self._waiting.evict(event.replica_id):
            self._queue(sample)
        for chunk in lost:
            self._failed(chunk.sample, f"replica {event.replica_id} left: {event.error}")

    def _weights_changed(self, event: ev.WeightsChanged) -> None:
        if event.version < self.board.weights_version:
            raise IllegalEvent(f"weights go back from {self.board.weights_version} to {event.version}")
        self.board.change_weights(event.version)
        for replica_id in self.board.ready():
            self._waiting.look_at(replica_id)

    # ---- decide ----------------------------------------------------------------------------------

    def decide(self, tick: ev.Tick) -> tuple[Action, ...]:
        """All actions due: ends and hand-outs since the last tick, then every chunk that can start now."""
        for chunk in self._aborts:
            if self._chunks.get(chunk.chunk_id) is chunk:  # it has not ended or been lost since
                self._outbox.append(AbortChunk(chunk.chunk_id, chunk.replica_id, False, "batch cancelled"))
        if self._unbound and self.board.ready():
            self._bind()
        for home in self._waiting.homes():
            while (found := self._waiting.take_first(home, self.board.room_tokens(home))) is not None:
                self._place(found)
        while self._waiting and (roomiest := self.board.roomiest()) is not None:
            found = self._waiting.take_first(None, self.board.room_tokens(roomiest))
            if found is None:
                break
            self._place(found)
        if not self._chunks and self._waiting and self.board.all_ready():
            self._give_up()
        actions, self._outbox, self._aborts = tuple(self._outbox), [], []
        return actions

    def _bind(self) -> None:
        """Queue the groups that waited for a ready replica; static orderings bind them to one now."""
        ready = self.board.ready()
        for group in [group for group in self._unbound if group.unended]:
            groups = len(self._batches[group.batch_id].groups)
            group.home = self.policies.ordering.bind(group.position, groups, ready)
            for sample in group.samples:
                if sample.state is State.WAITING:
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
        for sample in waiting if not self._chunks else ():
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
        max_tokens = sample.need_tokens - sample.group.spec.prompt_tokens - sample.generated_tokens
        chunk_id = f"{sample.sample_id}:{sample.chunks}"
        self.board.reserve(replica_id, chunk_id, sample.need_tokens)
        version = self.board.weights_version
        self._chunks[chunk_id] = Chunk(chunk_id, sample, replica_id, max_tokens, version)
        sample.state, sample.last_replica, sample.streamed_tokens = State.RUNNING, replica_id, 0
        sample.chunks += 1
        sample.group.chunks += 1
        sample.group.running += 1
        self._outbox.append(
            StartChunk(
                chunk_id, sample.sample_id, replica_id, sample.generated_tokens, max_tokens, version, version, 1, reason
            )
        )

    # ---- transitions -----------------------------------------------------------------------------

    def _stop(self, chunk: Chunk) -> Sample:
        del self._chunks[chunk.chunk_id]
        self.board.release(chunk.replica_id, chunk.chunk_id)
        self._waiting.look_at(chunk.replica_id)
        chunk.sample.group.running -= 1
        return chunk.sample

    def _failed(self, sample: Sample, error: str) -> None:
        sample.attempts += 1
        if sample.attempts < MAX_ATTEMPTS:
            self._wait_again(sample)
        else:
            error = f"{sample.attempts} chunks in a row failed; the last: {error}"
            self._end(sample, SampleEnd.FAILED, error, "given up")

    def _wait_again(self, sample: Sample) -> None:
        sample.state = State.WAITING
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
        view = sample.view()
        sample.need_tokens = view.prompt_tokens + view.generated_tokens + self.policies.chunking.tokens(view)
        self._waiting.put(sample, view)

    def _end(self, sample: Sample, end: SampleEnd, error: str | None, reason: str) -> None:
        self._waiting.drop(sample)
        sample.state = State.ENDED
        group = sample.group
        group.unended -= 1
        self._outbox.append(EndSample(sample.sample_id, end, error, reason))
        if end in (SampleEnd.STOP, SampleEnd.LENGTH):
            group.finished += 1
            group.longest_finished = max(group.longest_finished or 0, sample.generated_tokens)
            self._waiting.renew(group)
        if not group.unended:
            self._emit(group)

    def _emit(self, group: Group) -> None:
        self._outbox.append(EmitGroup(group.batch_id, group.spec.group_id, "all samples have ended"))
        for sample in group.samples:
            del self._samples[sample.sample_id]
        self._waiting.forget(group)
        batch = self._batches[group.batch_id]
        batch.unemitted -= 1
        if not batch.unemitted:
            del self._batches[group.batch_id]

    # ---- questions a shell asks -------------------------------------------------------------------

    def is_running(self, chunk_id: str) -> bool:
        return chunk_id in self._chunks

    def counts(self) -> dict[str, int]:
        """Samples that wait and run, and batches not handed out in full."""
        running = len(self._chunks)
        unended = sum(sample.state is not State.ENDED for sample in self._samples.values())
        return {"waiting": unended - running, "running": running, "batches": len(self._batches)}

    def _chunk(self, chunk_id: str) -> Chunk:
        if chunk_id not in self._chunks:
            raise IllegalEvent(f"chunk {chunk_id!r} is not running")
        return self._chunks[chunk_id]

    def _batch(self, batch_id: str) -> Batch:
        if batch_id not in self._batches:
            raise IllegalEvent(f"batch {batch_id!r} is not here")
        return self._batches[batch_id]


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
}
