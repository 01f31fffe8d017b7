"""Prefetches: the first waiting samples take the places of the chunks expected to end first.

Invariant: the KV of a sample is prefetched at most once for each node between two of its chunks. No KV is prefetched
while all replicas share one node's pool memory. Called by `RolloutCore`, once per decision; O(log chunks).
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.running_chunks import RunningChunks
from tailrace.policies.core.validation import checked_count
from tailrace.policies.core.wait_queue import WaitQueue
from tailrace.policies.families.prefetch import Prefetching
from tailrace.policies.protocol.actions import Prefetch


class PrefetchPlanner:
    """Reads the books of waiting samples and running chunks. Owns the order in which chunks are expected to end."""

    def __init__(self, policy: Prefetching, table: ReplicaTable, waiting: WaitQueue, running: RunningChunks):
        self._policy, self._table, self._waiting, self._running = policy, table, waiting, running
        self._ends: list[tuple[int, str]] = []  # (tokens left as noted, chunk id), dead entries among them
        self._looked_at: tuple | None = None  # running chunks and first samples at the last look

    def seen(self, chunk: Chunk) -> None:
        """Records that more of a chunk has been streamed, once half of the rest has been made. A report for each of 64
        chunks every 2 s would mean 80 records of a chunk of 8,192 tokens; with halves there are 13.
        """
        if 2 * (chunk.max_tokens - chunk.sample.streamed_tokens) <= chunk.listed_tokens and not self._table.one_node:
            self._note(chunk)

    def started(self, chunk: Chunk) -> None:
        """Records that a chunk has started."""
        if not self._table.one_node:
            self._note(chunk)

    def _note(self, chunk: Chunk) -> None:
        heappush(self._ends, _entry(chunk))
        if len(self._ends) > 64 + 4 * len(self._running):
            self.rebuild()

    def rebuild(self) -> None:
        """Rebuilds after a replica has joined: the place of a sample matters from the second node on."""
        self._ends = []
        if not self._table.one_node:
            self._ends = list(map(_entry, self._running.chunks.values()))
            heapify(self._ends)

    def prefetches(self, homes: Iterable[str]) -> list[Prefetch]:
        """Returns the prefetches due, on several nodes, once no waiting sample has room.

        `homes`: replicas with bound samples whose queue or room has changed. No others have changed.
        """
        depth = checked_count(self._policy, "look_ahead", self._policy.look_ahead(len(self._waiting)), 0)
        if not depth:
            return []
        pairs = [(sample, home) for home in homes for sample in self._waiting.next_up(home, depth)]
        heads = self._waiting.next_up(None, depth)
        now = (self._running.turns, [sample.sample_id for sample in heads])
        if now != self._looked_at:
            pairs += zip(heads, self._next_places(len(heads)), strict=False)
            self._looked_at = now
        return [action for pair in pairs for action in self._ask(*pair)]

    def _ask(self, sample: Sample, replica_id: str) -> tuple[Prefetch, ...]:
        node = self._table.node(replica_id)
        if not sample.stored_tokens or node == sample.last_node or node in sample.asked_nodes:
            return ()
        sample.asked_nodes += (node,)
        reason = f"it waits to run next on {replica_id}; its KV lies on node {sample.last_node}"
        return (Prefetch(sample.sample_id, replica_id, reason),)

    def _next_places(self, count: int) -> list[str]:
        """Returns the ready replicas of the `count` chunks with the fewest tokens left, as recorded. A replica can
        appear twice.
        """
        found: dict[str, tuple[int, str]] = {}
        while self._ends and len(found) < count:
            entry = heappop(self._ends)
            chunk = self._running.chunks.get(entry[1])
            if chunk is not None and entry[0] == chunk.listed_tokens and self._table.is_ready(chunk.replica_id):
                found[entry[1]] = entry
        for entry in found.values():
            heappush(self._ends, entry)
        return [self._running.chunks[chunk_id].replica_id for chunk_id in found]


def _entry(chunk: Chunk) -> tuple[int, str]:
    chunk.listed_tokens = chunk.max_tokens - chunk.sample.streamed_tokens
    return chunk.listed_tokens, chunk.chunk_id
