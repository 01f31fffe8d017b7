"""Running chunks: each is booked on its replica and, except copies, counted in its group.

Invariant: a chunk is here from its start until it has ended or its replica has left, and is aborted at most once.
A running sample has one chunk that is neither a copy nor beaten. Called by `RolloutCore` alone; other books read it.
"""

from tailrace.policies.core.kv_tracker import KvTracker
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.sample_states import RUNNING
from tailrace.policies.protocol.actions import AbortChunk
from tailrace.policies.protocol.events import IllegalEvent


class RunningChunks:
    """Running chunks. `turns` counts starts and ends: while equal, the same chunks run. len(): samples."""

    def __init__(self, table: ReplicaTable, kv: KvTracker):
        self._table, self._kv = table, kv
        self.chunks: dict[str, Chunk] = {}
        self.copies: dict[str, Chunk] = {}  # the racing ones of these
        self.turns = self._samples = 0
        self._aborts: list[tuple[Chunk, str]] = []  # to abort, with reasons

    def __len__(self):
        return self._samples

    def named(self, chunk_id: str) -> Chunk:
        if chunk_id not in self.chunks:
            raise IllegalEvent(f"chunk {chunk_id!r} is not running")
        return self.chunks[chunk_id]

    def start(self, sample: Sample, replica_id: str) -> Chunk:
        """Books the sample's next chunk, of its need, on a replica that has room for it."""
        chunk_id = f"{sample.sample_id}:{sample.chunks}"
        self._table.reserve(replica_id, chunk_id, sample.need_tokens)
        max_tokens = sample.need_tokens - sample.context_tokens
        version = self._table.version_of(replica_id)
        versions = version, self._kv.version(sample, version)
        chunk = self.chunks[chunk_id] = Chunk(chunk_id, sample, replica_id, max_tokens, *versions)
        chunk.born = self.turns
        sample.group.batch.running_tokens += chunk.kv_tokens
        sample.state, sample.streamed_tokens = RUNNING, 0
        sample.last_replica, sample.last_node, sample.asked_nodes = replica_id, self._table.node(replica_id), ()
        sample.chunks += 1
        sample.group.chunks += 1
        sample.group.running += 1
        self._samples += 1
        self.turns += 1
        return chunk

    def copy(self, chunk: Chunk, replica_id: str, method: str) -> Chunk:
        """Books a copy of a running chunk, on a replica that has room for it. Its name differs from those of earlier
        copies: a late answer of one that was lost is not taken for this one's.
        """
        before = chunk.copied.count(method)
        chunk_id = f"{chunk.chunk_id}~{method}" + (f"~{before}" if before else "")
        self._table.reserve(replica_id, chunk_id, chunk.sample.need_tokens)
        made = Chunk(
            chunk_id=chunk_id,
            sample=chunk.sample,
            replica_id=replica_id,
            max_tokens=chunk.max_tokens,
            weights_version=chunk.weights_version,
            kv_version=chunk.kv_version,
        )
        made.copy_of, made.method, made.born = chunk, method, self.turns
        made.sample.group.batch.running_tokens += made.kv_tokens
        chunk.copies.append(made)
        chunk.copied += (method,)
        self.chunks[chunk_id] = self.copies[chunk_id] = made
        self.turns += 1
        return made

    def stop(self, chunk: Chunk) -> None:
        """Removes a chunk that ended by itself or with its replica. A race without its original continues by copy."""
        del self.chunks[chunk.chunk_id]
        self.copies.pop(chunk.chunk_id, None)
        self.turns += 1
        chunk.sample.group.batch.running_tokens -= chunk.kv_tokens
        if chunk.replica_id in self._table:
            self._table.release(chunk.replica_id, chunk.chunk_id)

    def count_out(self, chunk: Chunk) -> Sample:
        """Counts the chunk's sample out of the running ones, and returns it."""
        chunk.sample.group.running -= 1
        self._samples -= 1
        return chunk.sample

    def lose(self, replica_id: str) -> list[Chunk]:
        """Removes a replica that has left. Returns its chunks, to be stopped."""
        return [self.chunks[chunk_id] for chunk_id in self._table.leave(replica_id)]

    def abort(self, chunk: Chunk, reason: str) -> None:
        if not chunk.aborting:
            chunk.aborting = True
            self._aborts.append((chunk, reason))

    def aborts(self) -> list[AbortChunk]:
        """Returns the aborts requested since the last call, except of chunks that have ended or been lost since."""
        aborts, self._aborts = self._aborts, []
        return [
            AbortChunk(chunk.chunk_id, chunk.replica_id, self._worth_keeping(chunk), reason)
            for chunk, reason in aborts
            if self.chunks.get(chunk.chunk_id) is chunk
        ]

    def _worth_keeping(self, chunk: Chunk) -> bool:
        useless = chunk.beaten or chunk.copy_of is not None or chunk.sample.cancelled
        return not useless and self._kv.keeps(chunk)
