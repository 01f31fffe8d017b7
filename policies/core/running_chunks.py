"""The chunks that run now: each of them booked on its replica and, but for copies, counted in its group.

Invariant: a chunk is here from its start until it has ended or its replica has left, and is told to stop at most once;
a running sample has one chunk that is neither a copy nor beaten. Called by `RolloutCore` alone; others read.
"""

from tailrace.policies.core.kv_tracker import KvTracker
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import RUNNING, Chunk, Sample
from tailrace.policies.protocol.actions import AbortChunk
from tailrace.policies.protocol.events import IllegalEvent


class RunningChunks:
    """`turns` counts starts and ends: while it stands still, the same chunks run. Its length is that of the samples."""

    def __init__(self, table: ReplicaTable, kv: KvTracker):
        self._table, self._kv = table, kv
        self.chunks: dict[str, Chunk] = {}
        self.copies: dict[str, Chunk] = {}  # of these, those that race
        self.turns = self._samples = 0
        self._aborts: list[tuple[Chunk, str]] = []  # to be stopped, and why

    def __len__(self):
        return self._samples

    def named(self, chunk_id: str) -> Chunk:
        if chunk_id not in self.chunks:
            raise IllegalEvent(f"chunk {chunk_id!r} is not running")
        return self.chunks[chunk_id]

    def start(self, sample: Sample, replica_id: str) -> Chunk:
        """Book the sample's next chunk, of its need, on a replica that has room for it."""
        chunk_id = f"{sample.sample_id}:{sample.chunks}"
        self._table.reserve(replica_id, chunk_id, sample.need_tokens)
        max_tokens = sample.need_tokens - sample.group.spec.prompt_tokens - sample.generated_tokens
        versions = self._table.weights_version, self._kv.version(sample)
        chunk = self.chunks[chunk_id] = Chunk(chunk_id, sample, replica_id, max_tokens, *versions)
        sample.state, sample.streamed_tokens = RUNNING, 0
        sample.last_replica, sample.last_node, sample.asked_nodes = replica_id, self._table.node(replica_id), ()
        sample.chunks += 1
        sample.group.chunks += 1
        sample.group.running += 1
        self._samples += 1
        self.turns += 1
        return chunk

    def copy(self, chunk: Chunk, replica_id: str, method: str) -> Chunk:
        """Book a copy of a running chunk, on a replica that has room for it."""
        chunk_id = f"{chunk.chunk_id}~{method}"
        self._table.reserve(replica_id, chunk_id, chunk.sample.need_tokens)
        made = Chunk(
            chunk_id=chunk_id,
            sample=chunk.sample,
            replica_id=replica_id,
            max_tokens=chunk.max_tokens,
            weights_version=chunk.weights_version,
            kv_version=chunk.kv_version,
        )
        made.copy_of, made.method = chunk, method
        chunk.copies.append(made)
        self.chunks[chunk_id] = self.copies[chunk_id] = made
        self.turns += 1
        return made

    def stop(self, chunk: Chunk) -> None:
        """It has ended, by itself or with its replica. A race without its original continues with a copy."""
        del self.chunks[chunk.chunk_id]
        self.copies.pop(chunk.chunk_id, None)
        self.turns += 1
        if chunk.replica_id in self._table:
            self._table.release(chunk.replica_id, chunk.chunk_id)

    def count_out(self, chunk: Chunk) -> Sample:
        """Its sample, which does not run any more."""
        chunk.sample.group.running -= 1
        self._samples -= 1
        return chunk.sample

    def lose(self, replica_id: str) -> list[Chunk]:
        """The replica has left: forget it; returns what ran on it, which is to be stopped."""
        return [self.chunks[chunk_id] for chunk_id in self._table.leave(replica_id)]

    def abort(self, chunk: Chunk, reason: str) -> None:
        if not chunk.aborting:
            chunk.aborting = True
            self._aborts.append((chunk, reason))

    def aborts(self) -> list[AbortChunk]:
        """Those asked for since the last call whose chunk has not ended or been lost since."""
        aborts, self._aborts = self._aborts, []
        return [
            AbortChunk(chunk.chunk_id, chunk.replica_id, self._worth_keeping(chunk), reason)
            for chunk, reason in aborts
            if self.chunks.get(chunk.chunk_id) is chunk
        ]

    def _worth_keeping(self, chunk: Chunk) -> bool:
        return not (chunk.beaten or chunk.sample.cancelled) and self._kv.keeps(chunk)
