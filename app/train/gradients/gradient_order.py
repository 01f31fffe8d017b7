"""The order in which the gradients of a step's groups are added, and which group to compute next.

Invariant: the sum does not depend on when groups end. Its order is fixed before the step by expected lengths; a group
that ends before its turn may be computed early, and its gradient is held until then. Pure.
"""

from collections.abc import Collection, Mapping, Sequence


def by_expected_length(question_ids: Sequence[str], longest: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the places of a step's questions, the shortest expected group first. Unknown ones are expected to be
    average.

    `longest`: tokens of each question's longest sample in its last step.
    """
    average = sum(longest.values()) / len(longest) if longest else 0.0
    return tuple(sorted(range(len(question_ids)), key=lambda place: (longest.get(question_ids[place], average), place)))


class GradientOrder:
    """One step. `places`: the first one is added first. `max_held`: maximum number of groups whose gradient waits for
    that of a group that has not begun.
    """

    def __init__(self, places: Sequence[int], max_held: int):
        self.places, self._max_held = tuple(places), max_held
        self._begun: set[int] = set()
        self._in_turn = 0  # places from the first one on that have begun

    def next(self, ended: Collection[int]) -> int | None:
        """Returns the place to compute now, or None: wait for another group to end. `ended`: places whose samples have
        ended.
        """
        for ahead, place in enumerate(self.places[self._in_turn :]):
            if place in self._begun or place not in ended:
                continue
            if ahead == 0 or len(self._begun) - self._in_turn < self._max_held:
                return place
            return None
        return None

    def begin(self, place: int) -> None:
        """Records that the gradient of a place is being computed."""
        self._begun.add(place)
        while self._in_turn < len(self.places) and self.places[self._in_turn] in self._begun:
            self._in_turn += 1
