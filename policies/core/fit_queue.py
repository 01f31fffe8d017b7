"""Waiting samples of one lane, with the query "first in order among those that fit in this much room".

A segment tree over the KV need (in steps of STEP_TOKENS) holds in each node the smallest entry below it. Each leaf is a
heap. Push, remove and peek cost O(log needs + log samples), so a full cluster never makes the core scan its queue. A
sample too large for the free room never blocks one that fits (law 7).
"""

from heapq import heapify, heappop, heappush

STEP_TOKENS = 64
"""Resolution of needs: half a chunk of the smallest deployment (128 tokens on a CPU). A finer step only deepens the
tree.
"""

MAX_NEED_TOKENS = 1 << 24
"""Maximum need, far above any model's context. It bounds the tree at 8 MiB."""


class FitQueue:
    """Items with a need (tokens) and an order key (a tuple, unique per item; lower goes first)."""

    def __init__(self):
        self._live: dict[str, tuple[tuple, str, int]] = {}  # item -> its entry (key, item, step)
        self._heaps: dict[int, list] = {}  # step -> entries, dead ones among them
        self._leaves = 64
        self._least: list[tuple | None] = [None] * 128  # node 1 is the root; leaf of a step: _leaves + step

    def __len__(self):
        return len(self._live)

    def key(self, item: str) -> tuple:
        return self._live[item][0]

    def push(self, item: str, need_tokens: int, key: tuple) -> None:
        """Adds `item`, or gives it a new need and key. Raises ValueError above MAX_NEED_TOKENS."""
        if need_tokens > MAX_NEED_TOKENS:
            raise ValueError(f"{item} needs {need_tokens} tokens of KV; the queue's bound is {MAX_NEED_TOKENS}")
        if item in self._live:
            self.remove(item)
        step = -(-need_tokens // STEP_TOKENS)
        if step + 1 >= self._leaves:  # `peek` reaches every step but the last
            self._grow(step)
        entry = self._live[item] = (key, item, step)
        heappush(self._heaps.setdefault(step, []), entry)
        self._raise(entry)

    def remove(self, item: str) -> None:
        entry = self._live.pop(item)
        heap = self._heaps[entry[2]]
        if heap[0] is entry:
            self._settle(heap, entry)
        elif len(heap) > 64 and len(heap) > 4 * len(self._live):
            heap[:] = [other for other in heap if self._live.get(other[1]) is other]
            heapify(heap)

    def peek(self, room_tokens: int) -> str | None:
        """Returns the first in order among the items whose need, rounded up to STEP_TOKENS, is at most
        `room_tokens`.
        """
        least, best = self._least, None
        node = self._leaves + min(room_tokens // STEP_TOKENS + 1, self._leaves - 1)
        while node > 1:  # every left sibling on the way up covers smaller needs only
            if node & 1:
                other = least[node - 1]
                if other is not None and (best is None or other < best):
                    best = other
            node >>= 1
        return None if best is None else best[1]

    def _raise(self, entry: tuple) -> None:
        """Puts a live entry into every node above it that holds none or a greater one."""
        least, node = self._least, self._leaves + entry[2]
        while node and (least[node] is None or entry < least[node]):
            least[node] = entry
            node >>= 1

    def _settle(self, heap: list, gone: tuple) -> None:
        """Drops dead entries from the top of a leaf, then renews the nodes above that named `gone`."""
        live, least = self._live, self._least
        while heap and live.get(heap[0][1]) is not heap[0]:
            heappop(heap)
        best = heap[0] if heap else None
        node = self._leaves + gone[2]
        while node and least[node] is gone:
            least[node] = best
            other = least[node ^ 1]
            if best is None or (other is not None and other < best):
                best = other
            node >>= 1

    def _grow(self, step: int) -> None:
        """Doubles the leaves until `step` has one, and one more for `peek`."""
        while step + 1 >= self._leaves:
            self._leaves *= 2
        self._least = [None] * (2 * self._leaves)
        for entry in self._live.values():
            self._raise(entry)
