"""Ends of samples: whether a chunk's end is also the end of its sample. Called by `RolloutCore`."""

from tailrace.policies.core.request_buffer import Chunk
from tailrace.policies.protocol.actions import SampleEnd
from tailrace.policies.protocol.events import ChunkEnd, ChunkFinished

BY_ITSELF = (SampleEnd.STOP, SampleEnd.LENGTH)


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
