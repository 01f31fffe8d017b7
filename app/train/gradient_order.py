"""The order in which the gradients of a step's groups are added, and which group to compute next.

Invariant: the sum does not depend on when groups end. It is fixed before the step by expected lengths; a group that
ends before its turn may be computed early, and its gradient is held until then. Pure; used by `GroupTrainer`.
"""

from collections.abc import Collection, Mapping, Sequence


def by_expected_length(question_ids: Sequence[str], longest: Mapping[str, int]) -> tuple[int, ...]:
    """Places of a step's questions, the shortest expected group first. Unknown ones are expected to be average.

    `longest`: tokens of the longest sample that each question had last.
    """
    average = sum(longest.values()) / len(longest) if longest else 0.0
    return tuple(sorted(range(len(question_ids)), key=lambda place: (longest.get(question_ids[place], average), place)))


class GradientOrder:
    """One step. `order`: places, the first one to be added first. `max_held`: gradients held at a time."""

    def __init__(self, order: Sequence[int], max_held: int):
        self._order, self._max_held = tuple(order), max_held
        self._computed: set[int] = set()
        self._added = 0

    def next(self, ended: Collection[int]) -> int | None:
        """The place to compute now, or None: wait for another group to end. `ended`: places whose samples are there."""
        for ahead, place in enumerate(self._order[self._added :]):
            if place in self._computed or place not in ended:
                continue
            if ahead == 0 or len(self._computed) - self._added < self._max_held:
                return place
            return None
        return None

    def compute(self, place: int) -> bool:
        """Note that a place is computed. Returns whether it is added at once; else its gradient is held."""
        self._computed.add(place)
        in_turn = self._order[self._added] == place
        self._added += in_turn
        return in_turn

    def due(self) -> int | None:
        """The held place whose turn has come, or None. It counts as added."""
        if self._added < len(self._order) and self._order[self._added] in self._computed:
            self._added += 1
            return self._order[self._added - 1]
        return None
