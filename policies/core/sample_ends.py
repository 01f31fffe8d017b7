"""Ends of samples: whether a chunk's end is also the end of its sample. Called by `RolloutCore`."""

from tailrace.policies.core.request_buffer import Chunk
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import Begun, ChunkEnd, ChunkFinished, GroupSpec

BY_ITSELF = (SampleEnd.STOP, SampleEnd.LENGTH)


def end_before(begun: Begun, spec: GroupSpec) -> SampleEnd | None:
    """Returns how a sample ended before it was submitted, or None if it continues."""
    if begun.stopped:
        return SampleEnd.STOP
    return SampleEnd.LENGTH if begun.tokens == spec.max_tokens else None


def end_by(event: ChunkFinished, chunk: Chunk) -> tuple[SampleEnd, str] | None:
    """Returns the end and its reason, or None if the sample continues. It has taken the event's tokens already."""
    sample = chunk.sample
    if event.end is ChunkEnd.STOP:
        return SampleEnd.STOP, "stop token"
    if sample.generated_tokens == sample.group.spec.max_tokens:
        return SampleEnd.LENGTH, "max_tokens of the sample"
    if event.end is ChunkEnd.LENGTH and event.new_tokens < chunk.max_tokens:
        return SampleEnd.LENGTH, "the model's context is used up"
    return None
