"""Sends features of prompts from the coordinator to replicas, through Ray's object store.

Invariant: an item is stored once, and travels to each node once, however many chunks, turns, samples and replicas need
it; it is freed with the last prompt that has it. Chunks carry references. Called at both ends of a chunk's call.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ray import ObjectRef

from tailrace.deployments.features.prompt_features import FeatureItem, ItemData, PromptFeatures
from tailrace.deployments.messages.chunk import ChunkRequest


class ReferredFeatures(NamedTuple):
    """A PromptFeatures with references. `places`: offset and length of each item; `data`: a reference of each."""

    places: tuple[tuple[int, int], ...]
    data: tuple
    name: str


class SharedFeatures:
    """The coordinator's references, by the items themselves. `put`: stores an item and returns a reference."""

    def __init__(self, put: Callable[[ItemData], object]):
        self._put = put
        self._references: WeakKeyDictionary[ItemData, object] = WeakKeyDictionary()

    def __len__(self):
        return len(self._references)

    def referred(self, chunk: ChunkRequest) -> ChunkRequest:
        """Returns the chunk with references instead of its features."""
        if chunk.features is None:
            return chunk
        places = tuple((item.offset, item.length) for item in chunk.features.items)
        data = tuple(self._reference(item.data) for item in chunk.features.items)
        return replace(chunk, features=ReferredFeatures(places, data, chunk.features.name))

    def _reference(self, item: ItemData) -> object:
        if item not in self._references:
            self._references[item] = self._put(item)
        return self._references[item]


async def with_features(chunk: ChunkRequest) -> ChunkRequest:
    """Returns the chunk with its features. Raises Ray's errors if they are lost."""
    if not isinstance(chunk.features, ReferredFeatures):
        return chunk
    places, references, name = chunk.features
    every = await asyncio.gather(*map(_held, references))
    items = (FeatureItem(*place, data) for place, data in zip(places, every, strict=True))
    return replace(chunk, features=PromptFeatures(tuple(items), name))


async def _held(reference: object) -> ItemData:
    """Returns the item of a reference. In simulation it is a copy of the item."""
    return await reference if isinstance(reference, ObjectRef) else reference
