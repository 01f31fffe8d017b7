"""Groups admitted and trained on one by one: a step's gradient is of whole groups as they end, each within a bound.

A group's deadline is `ahead` updates after its admission. A group that has ended may overtake one that runs, but only
while the steps left can hold all groups with earlier deadlines: none is dropped, and a long answer is late by `ahead`
updates at most. About half of the bound is admitted and half is left for long answers; sampling of what could become
too old is withheld, not cancelled. Invariant: groups leave in the order of admission, except those that still run.
Pure; called by `GroupFeed`, and by the simulator's `GroupLearner`.
"""

from collections import Counter
from collections.abc import Container, Hashable
from itertools import accumulate


class GroupTurns:
    """`size`: groups of a step. `ahead`: updates between a group's admission and its use, at most. `version`: steps
    trained on.
    """

    def __init__(self, size: int, ahead: int, version: int = 0):
        self._size, self._ahead, self._most = size, ahead, max(size, size * (1 + ahead) // 2)
        self.version, self.taken = version, 0  # `taken`: groups of the present step so far
        self._deadlines: dict[Hashable, int] = {}  # in order of admission

    @property
    def room(self) -> int:
        """Number of groups that may be admitted now."""
        return self._most - len(self._deadlines)

    def admit(self, group: Hashable) -> None:
        self._deadlines[group] = self.version + self._ahead

    def take(self, ended: Container) -> Hashable | None:
        """Takes the group that was admitted first among those that have ended and may be trained on now; None: wait."""
        if self.taken == self._size:
            return None
        due = Counter(self._deadlines.values())
        steps = range(self.version, self.version + self._ahead + 1)
        before = accumulate(due[step] for step in steps)
        spare = [(n + 1) * self._size - self.taken - groups for n, groups in enumerate(before)]
        for group, deadline in self._deadlines.items():
            if group in ended and all(spare[: deadline - self.version]):
                del self._deadlines[group]
                self.taken += 1
                return group
        return None

    def end_step(self) -> None:
        """Begins the next step. Raises ValueError if groups are late or missing."""
        if self.taken < self._size or self.version in self._deadlines.values():
            raise ValueError(f"step {self.version}: {self.taken} of {self._size} groups, or one past its deadline")
        self.version, self.taken = self.version + 1, 0
