"""Ends since the coordinator began: ends of chunks, samples and batches, and faults.

Invariant: a count never goes down, and each end is counted once. Written by `Rollouts` and `ChunkRunner` alone, a few
additions an end; read by `ServiceCollector`.
"""

from collections import Counter
from collections.abc import Mapping

from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.metrics.metric import Distribution
from tailrace.deployments.metrics.registry import CHUNK_SECONDS
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import ChunkEnd

MAX_CAME = 10_000
"""Maximum number of ended chunks that are not in the counts yet; about 2 MB."""

PHASES = ("queue", "prefill", "decode")


class EndTotals:
    """Counters by the labels of the metric with that name."""

    def __init__(self):
        self.tokens = 0
        self.updates = 0  # of ended samples, see `SampleRecord.updates`
        self.samples: Counter[str] = Counter()
        self.chunks: Counter[str] = Counter()
        self._came: list[tuple[ChunkEnd, float, float, float]] = []  # ends of chunks, until `settle`
        self.moves: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.batch_s: Counter[str] = Counter()
        self.chunk_s = {phase: Distribution(CHUNK_SECONDS.bounds) for phase in PHASES}

    def chunk_came(self, result: ChunkResult) -> None:
        """Counts a well-formed end of a chunk."""
        self._came.append((result.end, result.queue_s, result.prefill_s, result.decode_s))
        if len(self._came) >= MAX_CAME:
            self.settle()

    def settle(self) -> None:
        """Adds the recorded ends to the counts, all at once: a tenth of the time that single additions take."""
        if self._came:
            came, self._came = self._came, []
            ends, *seconds = zip(*came, strict=True)
            self.chunks.update(ends)
            for phase, values in zip(PHASES, seconds, strict=True):
                self.chunk_s[phase].add_all(values)

    def chunk_failed(self, lost: bool) -> None:
        """Counts a failed chunk. `lost`: it was lost with its replica."""
        self.chunks["lost" if lost else "failed"] += 1
        self.faults["chunk_lost" if lost else "chunk_failed"] += 1

    def wrote(self, result: ChunkResult, moved: bool) -> None:
        """Counts a written chunk. `moved`: it came from another replica than the one before."""
        self.tokens += len(result.token_ids)
        if moved:
            self.moves["pulled" if result.pulled_tokens else "recomputed"] += 1

    def sample_ended(self, end: SampleEnd) -> None:
        self.samples[end] += 1
        self.faults["sample_failed"] += end is SampleEnd.FAILED

    def batch_over(self, seconds: Mapping[str, float]) -> None:
        """Counts a batch whose groups have all been delivered. `seconds`: of its parts, see `LiveBatch.parts_s`."""
        self.batch_s.update(seconds)
