"""What a model has taken so far: a set of bounded size, whose least recently used members go first."""

from collections import OrderedDict
from collections.abc import Hashable


class Tried:
    """`most`: maximum number of members."""

    def __init__(self, most: int):
        self._most = most
        self._members: OrderedDict[Hashable, None] = OrderedDict()

    def has(self, member: Hashable) -> bool:
        """Returns whether the set has the member, which is then the most recently used."""
        if member in self._members:
            self._members.move_to_end(member)
        return member in self._members

    def add(self, *members: Hashable) -> None:
        """Adds members as the most recently used, and drops others beyond the limit."""
        for member in members:
            self._members[member] = None
            self._members.move_to_end(member)
        while len(self._members) > self._most:
            self._members.popitem(last=False)
