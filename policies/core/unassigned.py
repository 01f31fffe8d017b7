"""Groups whose samples are not queued yet: no replica is ready to bind them to, or their bound replica leaves.

Invariant: a group is here at most once, and leaves when a replica is ready. Called by `RolloutCore` alone.
"""

from collections.abc import Iterable

from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import WAITING, Group, RequestBuffer, Sample
from tailrace.policies.core.validation import checked_home
from tailrace.policies.families.ordering import Ordering


class UnassignedGroups:
    def __init__(self, ordering: Ordering, table: ReplicaTable, buffer: RequestBuffer):
        self._ordering, self._table, self._buffer = ordering, table, buffer
        self._groups: dict[Group, None] = {}  # an ordered set

    def __len__(self):
        return len(self._groups)

    def __contains__(self, group: Group) -> bool:
        return group in self._groups

    def add(self, groups: Iterable[Group]) -> None:
        self._groups |= dict.fromkeys(groups)

    def discard(self, group: Group) -> None:
        """Forget a group that has ended, if it is here."""
        self._groups.pop(group, None)

    def bind(self) -> list[Sample]:
        """Bind every group to a ready replica, if the ordering binds groups.

        Returns the samples to queue; none until a replica is ready.
        """
        if not self._groups or not (ready := self._table.ready()):
            return []
        groups, self._groups = self._groups, {}
        found = []
        for group in groups:
            of_batch = len(self._buffer.batch(group.batch_id).groups)
            home = self._ordering.bind(group.position, of_batch, ready)
            group.home = checked_home(self._ordering, home, ready)
            for sample in (sample for sample in group.samples if sample.state is WAITING):
                sample.home = group.home
                found.append(sample)
        return found
