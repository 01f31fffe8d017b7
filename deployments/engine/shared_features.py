"""Sends features of prompts from the coordinator to replicas, through Ray's object store.

Invariant: the features of a group are stored once, and travel to each node once, however many chunks, samples and
replicas need them; they are freed with the group's record. Chunks carry a reference. Called at both ends of a chunk's
call.
"""

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

from ray import ObjectRef

from tailrace.deployments.features.prompt_features import PromptFeatures
from tailrace.deployments.messages.chunk import ChunkRequest


class SharedFeatures:
    """The coordinator's references, by the features themselves. `put`: stores features and returns a reference."""

    def __init__(self, put: Callable[[PromptFeatures], object]):
        self._put = put
        self._references: WeakKeyDictionary[PromptFeatures, object] = WeakKeyDictionary()

    def __len__(self):
        return len(self._references)

    def referred(self, chunk: ChunkRequest) -> ChunkRequest:
        """Returns the chunk with a reference instead of its features."""
        if chunk.features is None:
            return chunk
        if chunk.features not in self._references:
            self._references[chunk.features] = self._put(chunk.features)
        return replace(chunk, features=self._references[chunk.features])


async def with_features(chunk: ChunkRequest) -> ChunkRequest:
    """Returns the chunk with its features. Raises Ray's errors if they are lost."""
    return replace(chunk, features=await chunk.features) if isinstance(chunk.features, ObjectRef) else chunk
