"""The waiting samples of one lane: "the first in order among those that fit in this much room".

A sparse segment tree over the KV need (in steps of STEP_TOKENS) holds in each node the least entry below it;
each leaf is a heap. Push, remove and peek cost O(log needs + log samples), so a full cluster never makes the
core walk its queue, and a sample too large for the room left never blocks one that fits (law 7).
"""

from heapq import heapify, heappop, heappush

STEP_TOKENS = 16
"""vLLM's smallest KV block: rounding a need up to it never wastes a block of any replica."""

_LEVELS = 16
_LEAF = 1 << _LEVELS
MAX_NEED_TOKENS = STEP_TOKENS * (_LEAF - 2)


class FitQueue:
    """Items with a need (tokens) and an order key (a tuple, unique per item; lower goes first)."""

    def __init__(self):
        self._live: dict[str, tuple[tuple, str, int]] = {}  # item -> its entry (key, item, leaf)
        self._heaps: dict[int, list] = {}
        self._least: dict[int, tuple] = {}  # tree node -> least live entry below it

    def __len__(self):
        return len(self._live)

    def key(self, item: str) -> tuple:
        return self._live[item][0]

    def push(self, item: str, need_tokens: int, key: tuple) -> None:
        """Add `item`, or give it a new need and key. Raises ValueError above MAX_NEED_TOKENS."""
        if need_tokens > MAX_NEED_TOKENS:
            raise ValueError(f"{item} needs {need_tokens} tokens of KV; the queue's bound is {MAX_NEED_TOKENS}")
        if item in self._live:
            self.remove(item)
        leaf = _LEAF + -(-need_tokens // STEP_TOKENS)
        entry = self._live[item] = (key, item, leaf)
        heappush(self._heaps.setdefault(leaf, []), entry)
        least, node = self._least, leaf
        while node and (node not in least or entry < least[node]):
            least[node] = entry
            node >>= 1

    def remove(self, item: str) -> None:
        entry = self._live.pop(item)
        leaf = entry[2]
        heap = self._heaps[leaf]
        if heap[0] is entry:
            self._settle(leaf, heap, entry)
        elif len(heap) > 64 and len(heap) > 4 * len(self._live):
            heap[:] = [other for other in heap if self._live.get(other[1]) is other]
            heapify(heap)

    def _settle(self, leaf: int, heap: list, gone: tuple) -> None:
        """Drop dead entries from the top of a leaf, then renew the nodes above that named `gone`."""
        live, least = self._live, self._least
        while heap and live.get(heap[0][1]) is not heap[0]:
            heappop(heap)
        if heap:
            least[leaf] = heap[0]
        else:
            del self._heaps[leaf], least[leaf]
        node = leaf >> 1
        while node and least[node] is gone:
            left, right = least.get(2 * node), least.get(2 * node + 1)
            best = left if right is None or (left is not None and left < right) else right
            if best is None:
                del least[node]
            else:
                least[node] = best
            node >>= 1

    def peek(self, room_tokens: int) -> str | None:
        """The first in order among the items whose need, rounded up to STEP_TOKENS, is at most `room_tokens`."""
        least = self._least
        node = _LEAF + min(room_tokens // STEP_TOKENS, _LEAF - 2) + 1
        best = None
        while node > 1:  # every left sibling on the way up covers smaller needs only
            if node & 1:
                other = least.get(node - 1)
                if other is not None and (best is None or other < best):
                    best = other
            node >>= 1
        return None if best is None else best[1]
