"""The chunks that run now: each of them booked on its replica and counted in its group.

Invariant: a chunk is here from its start until it has ended or its replica has left, and is told to stop at most
once. Called by `RolloutCore` alone; `Upcoming` reads.
"""

from policies.actions import AbortChunk
from policies.board import Board
from policies.buffer import RUNNING, Chunk, Sample
from policies.events import IllegalEvent
from policies.kvbook import KvBook


class Running:
    """`turns` counts starts and ends: while it stands still, the same chunks run."""

    def __init__(self, board: Board, kv: KvBook):
        self._board, self._kv = board, kv
        self.chunks: dict[str, Chunk] = {}
        self.turns = 0
        self._aborts: list[tuple[Chunk, str]] = []  # to be stopped, and why

    def __len__(self):
        return len(self.chunks)

    def named(self, chunk_id: str) -> Chunk:
        if chunk_id not in self.chunks:
            raise IllegalEvent(f"chunk {chunk_id!r} is not running")
        return self.chunks[chunk_id]

    def start(self, sample: Sample, replica_id: str) -> Chunk:
        """Book the sample's next chunk, of its need, on a replica that has room for it."""
        chunk_id = f"{sample.sample_id}:{sample.chunks}"
        self._board.reserve(replica_id, chunk_id, sample.need_tokens)
        max_tokens = sample.need_tokens - sample.group.spec.prompt_tokens - sample.generated_tokens
        versions = self._board.weights_version, self._kv.version(sample)
        chunk = self.chunks[chunk_id] = Chunk(chunk_id, sample, replica_id, max_tokens, *versions)
        sample.state, sample.streamed_tokens = RUNNING, 0
        sample.last_replica, sample.last_node, sample.asked_nodes = replica_id, self._board.node(replica_id), ()
        sample.chunks += 1
        sample.group.chunks += 1
        sample.group.running += 1
        self.turns += 1
        return chunk

    def stop(self, chunk: Chunk) -> None:
        """It has ended."""
        del self.chunks[chunk.chunk_id]
        self._board.release(chunk.replica_id, chunk.chunk_id)
        chunk.sample.group.running -= 1
        self.turns += 1

    def lose(self, replica_id: str) -> list[Chunk]:
        """The replica has left: forget it, and what ran on it, which is returned."""
        lost = [self.chunks.pop(chunk_id) for chunk_id in self._board.leave(replica_id)]
        for chunk in lost:
            chunk.sample.group.running -= 1
        self.turns += 1
        return lost

    def abort(self, chunk: Chunk, reason: str) -> None:
        if not chunk.aborting:
            chunk.aborting = True
            self._aborts.append((chunk, reason))

    def aborts(self) -> list[AbortChunk]:
        """Those asked for since the last call whose chunk has not ended or been lost since."""
        aborts, self._aborts = self._aborts, []
        return [
            AbortChunk(chunk.chunk_id, chunk.replica_id, not chunk.sample.cancelled and self._kv.keeps(chunk), reason)
            for chunk, reason in aborts
            if self.chunks.get(chunk.chunk_id) is chunk
        ]
