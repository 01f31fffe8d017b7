"""Groups whose samples are not queued yet: no replica is ready to bind them to, or their bound replica leaves.

Invariant: a group is here at most once, and leaves when a replica is ready. Its samples that end under older weights do
not wait for that: the replica that keeps these weights may be the only one, and takes others after them. Called by
`RolloutCore` alone.
"""

from collections.abc import Callable, Iterable
from itertools import groupby

from tailrace.policies.core.outliers import Outliers
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Group, RequestBuffer, Sample
from tailrace.policies.core.sample_states import WAITING
from tailrace.policies.core.validation import checked_home
from tailrace.policies.families.ordering import Ordering
from tailrace.policies.protocol.views import PromptView


class UnassignedGroups:
    def __init__(self, ordering: Ordering, table: ReplicaTable, buffer: RequestBuffer, outliers: Outliers):
        self._ordering, self._table, self._buffer, self._outliers = ordering, table, buffer, outliers
        self._groups: dict[Group, None] = {}  # an ordered set

    def __len__(self):
        return len(self._groups)

    def __contains__(self, group: Group) -> bool:
        return group in self._groups

    def add(self, groups: Iterable[Group]) -> None:
        self._groups |= dict.fromkeys(groups)

    def discard(self, group: Group) -> None:
        """Forgets a group that has ended, if it is here."""
        self._groups.pop(group, None)
        self._outliers.forget(group)

    def bind(self) -> list[Sample]:
        """Binds every group to a ready replica, if the ordering binds groups.

        Returns the samples to queue; until a replica is ready, those of older weights that are kept for them.
        """
        if not self._groups or not (ready := self._table.ready()):
            return self._kept() if self._table.kept else []
        groups, self._groups = self._groups, {}
        homes, found = self._homes(groups, ready), []
        for group in groups:
            group.home = checked_home(self._ordering, homes(group), ready)
            for sample in group.samples:
                if sample.state is WAITING and self._outliers.home(sample) is None:
                    sample.home = group.home
                    found.append(sample)
        return found

    def _kept(self) -> list[Sample]:
        samples = (sample for group in self._groups for sample in group.samples if sample.state is WAITING)
        return [sample for sample in samples if sample.first_version in self._table.kept]

    def _homes(self, groups: Iterable[Group], ready: list[str]) -> Callable[[Group], str | None]:
        """Returns the function that gives each group its home: `homes` of an ordering that binds whole batches, else
        `bind`, one by one.
        """
        if not hasattr(self._ordering, "homes"):
            return lambda group: self._bind(group, ready)
        replicas, found = [self._table.view(replica_id) for replica_id in ready], {}
        for batch, of_batch in groupby(groups, key=lambda group: group.batch):
            bound = list(of_batch)
            views = [
                PromptView(spec.group_id, spec.prompt_tokens, spec.samples, spec.past_lengths)
                for spec in (group.spec for group in bound)
            ]
            found |= zip(bound, self._ordering.homes(views, batch.step, replicas), strict=True)
            self._outliers.rank(batch, bound, views, replicas)
        return found.__getitem__

    def _bind(self, group: Group, ready: list[str]) -> str | None:
        """Returns the home of one group. The final number of groups of an open batch is unknown, so replicas take
        turns.
        """
        if group.batch.forgets:
            return self._ordering.bind(group.position % len(ready), len(ready), ready)
        return self._ordering.bind(group.position, group.batch.positions, ready)
