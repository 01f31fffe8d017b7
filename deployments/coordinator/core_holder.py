"""The present core, and the settings of the next one: policies, limits, whether it writes a journal.

Invariant: a core is exchanged only while no batch is in flight, and the next one starts from the same weights and
replicas. A journal is written only while a driver that wants it gives signs of life. Called by `Rollouts`.
"""

from collections.abc import Iterable

from tailrace.deployments.coordinator.journal import JournaledCore
from tailrace.deployments.messages.liveness import LEASE_S
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.events import ReplicaJoined


class CoreHolder:
    """`present` decides; `exchange` puts the next one in its place, if something was set since."""

    def __init__(self, policies: Policies):
        self.present = RolloutCore(policies)
        self._policies, self._limits, self._kind = policies, None, RolloutCore
        self._due = False
        self._journal_until_s: float | None = None  # None: no driver wants a journal

    @property
    def due(self) -> bool:
        """Whether something was set that the present core does not have."""
        return self._due

    def set_policies(self, policies: Policies) -> None:
        self._policies, self._due = policies, True

    def set_limits(self, limits: Limits | None) -> None:
        """How many engine replicas there may be, where that may change."""
        self._limits, self._due = limits, True

    def journal(self, on: bool, now: float) -> str | None:
        """Turn journaling on or off for the next core. Returns the present core's journal, or None if it has none.

        It stays on for LEASE_S, and longer by `renew_journal`.
        """
        written = self.present.journal() if isinstance(self.present, JournaledCore) else None
        self._kind, self._due = JournaledCore, True
        self._journal_until_s = now + LEASE_S
        if not on:
            self._end_journal()
        return written

    def renew_journal(self, now: float) -> None:
        """A sign of life of a driver that wants a journal."""
        if self._journal_until_s is not None:
            self._journal_until_s = now + LEASE_S

    def expire_journal(self, now: float) -> None:
        """End a journal whose drivers are gone, and free its memory. No batch waits for another core because of it."""
        if self._journal_until_s is not None and now > self._journal_until_s:
            self._end_journal()

    def _end_journal(self) -> None:
        self._kind, self._journal_until_s = RolloutCore, None
        if isinstance(self.present, JournaledCore):
            self.present.stop()

    def exchange(self, joined: Iterable[ReplicaJoined]) -> None:
        """Replace the core if a setting has changed. `joined`: the last ReplicaJoined of each present replica."""
        if not self._due:
            return
        self._due = False
        self.restart(joined)

    def restart(self, joined: Iterable[ReplicaJoined]) -> None:
        """Begin with a core that knows these replicas and no batch."""
        self.present = self._kind(self._policies, self.present.replicas.weights_version, self._limits)
        for event in joined:
            self.present.observe(event)
