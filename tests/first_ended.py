"""The bias that the bound of `bounded_groups` prevents, so that tests of it can fail."""

from tailrace.policies.models.group_turns import GroupTurns


class FirstEnded(GroupTurns):
    """A step takes whatever has ended first, and begins others in its place, with no bound."""

    @property
    def room(self) -> int:
        return self._most - len(self._deadlines) + sum(step < self.version for step in self._deadlines.values())

    def take(self, ended):
        group = next((one for one in self._deadlines if one in ended), None) if self.taken < self._size else None
        if group is not None:
            del self._deadlines[group]
            self.taken += 1
        return group

    def end_step(self) -> None:
        self.version, self.taken = self.version + 1, 0
