"""Processed images that a gateway remembers, so that a conversation's earlier ones are not processed again.

Invariant: their items have at most a number of bytes; the least recently used are dropped. Not safe on several threads.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple


class ProcessedItem(NamedTuple):
    """`name`: of the item, as PromptFeatures names it. `data`: vLLM's msgpack in base64."""

    name: str
    data: str


class RememberedItems:
    """Items by the digests of their images' files. `most_bytes`: maximum over all data."""

    def __init__(self, most_bytes: int):
        self._left = most_bytes
        self._items: OrderedDict[str, ProcessedItem] = OrderedDict()

    def find(self, digest: str) -> ProcessedItem | None:
        """Returns the item of a file, which is then the most recently used."""
        if digest in self._items:
            self._items.move_to_end(digest)
        return self._items.get(digest)

    def add(self, items: Mapping[str, ProcessedItem]) -> None:
        """Adds items, and drops others beyond the limit."""
        for digest, item in items.items():
            if self.find(digest) is None:
                self._items[digest] = item
                self._left -= len(item.data)
        while self._left < 0:
            _, dropped = self._items.popitem(last=False)
            self._left += len(dropped.data)
