"""Looks at a service: a snapshot as rows by section, and those that have changed since the look before.

Invariant: a look only reads. Called by `Feed`.
"""

from collections.abc import Callable, Iterable

from tailrace.deployments.feed.deltas import Sections, change
from tailrace.deployments.feed.sections import sections_of
from tailrace.deployments.feed.survey import Survey
from tailrace.deployments.messages.status import ReplicaStatus, ServiceSnapshot


class Looks:
    """`snapshot`: takes one, with a survey. `pool_keys`: keys of the pool by weights version, set by `Feed`."""

    def __init__(self, snapshot: Callable[[Survey], ServiceSnapshot]):
        self._snapshot = snapshot
        self.pool_keys: dict[int, int] = {}
        self.begin()

    def begin(self) -> None:
        """Starts over: the next look finds all rows new."""
        self._survey = Survey()
        self._known: Sections = {}
        self._made, self._made_by = 0, {}

    def look(self) -> Sections:
        """Returns the rows that have changed, and None for removed ones."""
        snapshot = self._snapshot(self._survey)
        sections = sections_of(snapshot, self.pool_keys)
        sections["service"]["made"] = self._made_since(snapshot.replicas)
        changes = {name: change(self._known.get(name, {}), rows) for name, rows in sections.items()}
        self._known = sections
        return changes

    def _made_since(self, replicas: Iterable[ReplicaStatus]) -> int:
        """Returns the tokens of all replicas since the first look. A replica that restarts counts from 0 again."""
        made_by = {replica.replica_id: replica.work.get("tokens", 0) for replica in replicas}
        self._made += sum(max(0, made - self._made_by.get(name, made)) for name, made in made_by.items())
        self._made_by = made_by
        return self._made
