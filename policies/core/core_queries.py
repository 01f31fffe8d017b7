"""Queries of a shell about the core: what runs, waits and is known. They change nothing.

The base of `RolloutCore`, whose books they read.
"""

from collections import Counter

from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.protocol import events as ev


class CoreQueries:
    """`RolloutCore` has the books."""

    def is_running(self, chunk_id: str) -> bool:
        return chunk_id in self._running.chunks

    def knows_batch(self, batch_id: str) -> bool:
        """Returns whether some group of the batch has not been emitted."""
        return batch_id in self._buffer.batches

    def is_late(self, event: ev.Event) -> bool:
        """Returns whether the subject of an event has already ended: a lost replica's chunk, an emitted batch."""
        match event:
            case ev.ChunkFinished() | ev.ChunkFailed():
                return not self.is_running(event.chunk_id)
            case ev.ReplicaLeft() | ev.ReplicaMeasured():
                return event.replica_id not in self.replicas
            case ev.BatchCancelled():
                return not self.knows_batch(event.batch_id)
            case ev.SampleCancelled():
                return event.sample_id not in self._buffer.samples
        return False

    def counts_tokens(self, event: ev.ChunkFinished) -> bool:
        """Returns whether the tokens of a running chunk count for its sample at this end."""
        return self._races.counts(event, self._running.chunks[event.chunk_id])

    def samples(self) -> list[Sample]:
        """Returns all samples whose groups have not been emitted; read only. O(samples), 0.3 ms for 50,000."""
        return list(self._buffer.samples.values())

    def sample(self, sample_id: str) -> Sample | None:
        """Returns a sample whose group has not been emitted; read only; None if there is none with that id."""
        return self._buffer.samples.get(sample_id)

    def room_wanted(self, sample: Sample) -> str:
        """Returns why a waiting sample does not run."""
        if self._failures.is_paused(sample):
            return self._failures.awaited(sample)
        if sample.group in self._unassigned:
            return "a replica that is ready"
        if sample.kept_version is not None:
            return f"room on a replica of weights {sample.kept_version}"
        if self._lanes.is_lane(sample):
            return "room on the replica of its lane"
        return "room on any replica" if sample.home is None else "room on the replica of its group"

    def copies(self) -> list[tuple[str, str]]:
        """Returns the sample and the replica of each racing copy."""
        return [(copy.sample.sample_id, copy.replica_id) for copy in self._running.copies.values()]

    def counts(self) -> dict[str, int]:
        """Returns the number of waiting, running and held samples, and of batches that are not fully emitted."""
        running, held = len(self._running), len(self._held)
        waiting = self._buffer.unended - running - held
        return {"waiting": waiting, "running": running, "held": held, "batches": len(self._buffer.batches)}

    def queued(self) -> Counter[int]:
        """Returns the number of queued samples by priority. O(queued samples) with several priorities."""
        priorities = {batch.priority for batch in self._buffer.batches.values()}
        if len(priorities) > 1:
            return self._waiting.by_priority()
        return Counter(dict.fromkeys(priorities, len(self._waiting)))
