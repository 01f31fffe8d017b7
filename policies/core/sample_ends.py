"""Ends of turns and samples: whether a chunk's end also ends its turn, and the samples between two turns.

Invariant: a held sample is here from its turn's end until it returns, is cancelled, or its time is over. Called by
`RolloutCore` alone.
"""

from heapq import heapify, heappop, heappush

from tailrace.policies.core.request_buffer import Chunk, Sample
from tailrace.policies.core.sample_states import HELD
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import Begun, ChunkEnd, ChunkFinished, GroupSpec

BY_ITSELF = (SampleEnd.STOP, SampleEnd.LENGTH)


def end_before(begun: Begun, spec: GroupSpec) -> SampleEnd | None:
    """Returns how a sample ended before it was submitted, or None if it continues."""
    if begun.stopped:
        return SampleEnd.STOP
    return SampleEnd.LENGTH if begun.tokens == spec.max_tokens else None


def end_by(event: ChunkFinished, chunk: Chunk) -> tuple[SampleEnd, str] | None:
    """Returns the end and its reason, or None if the sample continues. The sample has already taken the event's
    tokens.
    """
    sample = chunk.sample
    if event.end is ChunkEnd.STOP:
        return SampleEnd.STOP, "stop token"
    if sample.generated_tokens == sample.max_tokens:
        return SampleEnd.LENGTH, "max_tokens of the sample"
    if event.end is ChunkEnd.LENGTH and event.new_tokens < chunk.max_tokens:
        return SampleEnd.LENGTH, "the model's context is used up"
    return None


class HeldSamples:
    """Samples between two turns, each with the end of its last turn and a deadline. O(log samples) a turn."""

    def __init__(self):
        self._ends: dict[str, tuple[float, SampleEnd]] = {}  # by sample id; seconds
        self._due: list[tuple[float, str, Sample]] = []  # dead entries among them

    def __len__(self):
        return len(self._ends)

    def hold(self, sample: Sample, end: SampleEnd, until_s: float) -> None:
        """Holds a sample whose turn has ended."""
        sample.state = HELD
        self._ends[sample.sample_id] = until_s, end
        heappush(self._due, (until_s, sample.sample_id, sample))
        if len(self._due) > 64 + 4 * len(self._ends):
            self._due = [entry for entry in self._due if self._is_held(*entry)]
            heapify(self._due)

    def renew(self, sample: Sample, until_s: float) -> None:
        """Gives a sample that is here another deadline."""
        self.hold(sample, self._ends[sample.sample_id][1], until_s)

    def take(self, sample: Sample) -> SampleEnd:
        """Removes a sample. Returns the end of its last turn."""
        return self._ends.pop(sample.sample_id)[1]

    def expired(self, now: float) -> list[Sample]:
        """Returns samples whose deadline has passed, in its order, each once; they are still here."""
        found: dict[str, Sample] = {}  # a deadline that was renewed unchanged has two entries
        while self._due and self._due[0][0] <= now:
            entry = heappop(self._due)
            if self._is_held(*entry):
                found[entry[1]] = entry[2]
        return list(found.values())

    def _is_held(self, until_s: float, sample_id: str, sample: Sample) -> bool:
        return self._ends.get(sample_id, (None,))[0] == until_s
