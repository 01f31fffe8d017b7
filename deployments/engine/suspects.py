"""The search for the chunk that makes an engine's steps raise: which chunks run, and which wait, after such a step.

Owned by the stepper, which reports raising steps, tokens and ends. Pure: chunk ids in, chunk ids out.
The chunks of a raising step are halved until one runs alone. If its step raises, and one with it has before, it is to
blame.
A chunk is cleared once it has made as many tokens as the raising step might have; then it waits for the search's end.
Invariants: a chunk that never raises alone is never blamed; every search ends, after at most 2 n trials of n chunks.
A fault of several chunks together lowers the number that run together, in the end to one, until all of them have ended.
"""

from collections import Counter
from collections.abc import Mapping

FREE_SEARCHES = 1
"""Number of searches without a culprit before fewer chunks run together: a fault that does not recur costs no more."""

RAISES_TO_BLAME = 2
"""Number of raising steps that make a chunk guilty, the last one with it alone: a fault that does not recur blames no
chunk.
"""


class Suspects:
    """The search of one engine. While it is `quiet` it knows no chunk, and all of them run."""

    def __init__(self):
        self._known: dict[str, None] = {}  # in the order in which they came
        self._careful: set[str] = set()  # chunks whose search has found no culprit
        self._fruitless, self._cap = 0, 0  # 0: any number of chunks may run
        self._end_search()

    def _end_search(self) -> None:
        self._trial: list[str] = []
        self._groups: list[list[str]] = []  # to be tried later, the last one next
        self._missing: dict[str, int] = {}  # tokens until a suspect is cleared
        self._raises: Counter[str] = Counter()
        self._smallest, self._has_found = 0, False  # the smallest number of chunks in a step that raised

    @property
    def quiet(self) -> bool:
        """True if all chunks run: there is no search, and no earlier one matters any more."""
        return not self._trial and not self._careful

    @property
    def searching(self) -> bool:
        return bool(self._trial)

    def running(self) -> list[str]:
        """Returns the chunks that run now; all others that joined wait. Must not be called while it is quiet."""
        if self._trial:
            return list(self._trial)
        known = sorted(self._known, key=lambda chunk_id: chunk_id not in self._careful)
        return known[: self._cap] if self._cap else known

    def join(self, chunk_id: str) -> None:
        """Adds a new chunk: it waits for the end of a search."""
        if not self.quiet:
            self._known[chunk_id] = None

    def raised(self, possible: Mapping[str, int]) -> str | None:
        """Records that a step raised with these chunks. `possible`: number of tokens that it might have made of each.

        Returns the chunk that is to blame unless the engine is broken; the caller must then blame it or end the engine.
        """
        for chunk_id, tokens in possible.items():
            self._known[chunk_id] = None
            self._missing[chunk_id] = max(tokens, 1, self._missing.get(chunk_id, 0))
        self._raises.update(list(possible))
        group, size = list(possible), len(possible)
        self._smallest = min(size, self._smallest or size)
        if size == 1 and self._raises[group[0]] >= RAISES_TO_BLAME:
            return group[0]
        if rest := [chunk_id for chunk_id in self._trial if chunk_id not in possible]:
            self._groups.append(rest)  # it was about to be tried in the step that raised
        half = (size + 1) // 2
        self._trial = group[:half]
        if group[half:]:
            self._groups.append(group[half:])
        return None

    def made(self, chunk_id: str, tokens: int) -> None:
        """Records that a chunk has made tokens in a step that did not raise."""
        if chunk_id in self._trial:
            self._missing[chunk_id] -= tokens
            self._go_on()

    def blame(self, chunk_id: str) -> None:
        """Records that the chunk which `raised` returned has ended."""
        self._has_found = True
        self.leave(chunk_id)

    def leave(self, chunk_id: str) -> None:
        """Records that a chunk has ended, however it did."""
        self._known.pop(chunk_id, None)
        self._careful.discard(chunk_id)
        was_searching = self.searching
        for group in (self._trial, *self._groups):
            if chunk_id in group:
                group.remove(chunk_id)
        if was_searching:
            self._go_on()
        elif self.quiet:
            self._forget()

    def _go_on(self) -> None:
        """Tries the next group if all of the present one are cleared; ends the search after the last."""
        if any(self._missing[chunk_id] > 0 for chunk_id in self._trial):
            return
        groups = [group for group in self._groups if group]
        if groups:
            self._trial, self._groups = groups[-1], groups[:-1]
            return
        if not self._has_found:
            self._fruitless += 1
            self._careful = set(self._known)
            if self._fruitless > FREE_SEARCHES:
                self._cap = max(1, self._smallest // 2)
        self._end_search()
        if self.quiet:
            self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._fruitless, self._cap = 0, 0
