"""Groups whose samples are not queued yet: no replica was ready to bind them to, or the one they were bound to goes.

Invariant: a group is here at most once, and leaves when a replica is ready. Called by `RolloutCore` alone.
"""

from collections.abc import Iterable

from policies.board import Board
from policies.buffer import WAITING, Buffer, Group, Sample
from policies.ordering import Ordering


class Unbound:
    def __init__(self, ordering: Ordering, board: Board, buffer: Buffer):
        self._ordering, self._board, self._buffer = ordering, board, buffer
        self._groups: list[Group] = []

    def __len__(self):
        return len(self._groups)

    def add(self, groups: Iterable[Group]) -> None:
        self._groups += (group for group in groups if group not in self._groups)

    def bind(self) -> list[Sample]:
        """Bind every group, if the ordering does so, to a ready replica; returns their samples that are to be queued.
        Until one is ready there are none."""
        if not self._groups or not (ready := self._board.ready()):
            return []
        groups, self._groups = self._groups, []
        found = []
        for group in (group for group in groups if group.unended):
            of_batch = len(self._buffer.batch(group.batch_id).groups)
            group.home = self._ordering.bind(group.position, of_batch, ready)
            for sample in (sample for sample in group.samples if sample.state is WAITING):
                sample.home = group.home
                found.append(sample)
        return found
