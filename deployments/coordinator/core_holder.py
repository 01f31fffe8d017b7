"""Holds the present core and the settings of the next one: policies, limits, and whether it writes a journal.

Invariant: a core is exchanged only while no batch is in flight, and the next one starts from the same weights and
replicas. A journal is written only while a driver that wants it renews its lease. Called by `Rollouts`.
"""

from collections.abc import Callable, Iterable

from pydantic import ValidationError

from tailrace.deployments.coordinator.journal import JournaledCore
from tailrace.deployments.messages.liveness import LEASE_S
from tailrace.deployments.messages.rollout import Rejected
from tailrace.policies.core.rollout import RolloutCore
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.kv_on_update import finishes
from tailrace.policies.families.registry import Policies
from tailrace.policies.protocol.events import ReplicaJoined
from tailrace.policies.protocol.exactness import Exactness


class CoreHolder:
    """`present` is the core in use; `exchange` replaces it if a setting has changed. `now`: the coordinator's clock."""

    def __init__(self, policies: Policies, now: Callable[[], float]):
        self.present, self._now = RolloutCore(policies), now
        self._policies, self._limits, self._kind = policies, None, RolloutCore
        self._exactness: Exactness = "bits"
        self._sizes = 1, 0  # see `set_sizes`
        self._due = False
        self._journal_until_s: float | None = None  # None: no driver wants a journal

    @property
    def exactness(self) -> Exactness:
        return self._exactness

    @property
    def due(self) -> bool:
        """True if a setting has changed that the present core does not have."""
        return self._due

    def in_flight(self) -> int:
        """Returns the number of samples that wait or run."""
        counts = self.present.counts()
        return counts["waiting"] + counts["running"]

    @property
    def finishes(self) -> bool:
        """True if samples of the next core end under the weights that they began with."""
        return finishes(self._policies.kv_on_update)

    def keeps(self, replica_id: str, version: int | None) -> bool:
        """Returns whether a replica keeps older weights for samples that began with them, see `policies.core.drain`.

        `version`: the wanted weights, or None if no replica has read them. The core may not know them yet.
        """
        replicas = self.present.replicas
        told = version in (None, replicas.weights_version)
        return replicas.keeps(replica_id) if told else finishes(self.present.policies.kv_on_update)

    def set_policies(self, policies: Policies) -> None:
        """Sets the policies, with the sizes of the engines where they have none."""
        self._policies, self._due = policies.sized(*self._sizes), True

    def take_policies(self, policies: dict) -> Rejected | None:
        """Sets a driver's policies. `policies`: a dump, which loads no class before it is checked."""
        try:
            self.set_policies(Policies(**policies))
        except ValidationError as error:
            return Rejected(reason=error.errors()[0]["msg"].removeprefix("Value error, "))
        return None

    def set_sizes(self, block_tokens: int, drafters: int) -> None:
        """Sets the tokens per KV block of the engines (1: chunks end anywhere), and the number of draft models, of
        policies that are set later.
        """
        self._sizes = block_tokens, drafters

    def set_limits(self, limits: Limits | None) -> None:
        """Sets the minimum and maximum number of engine replicas; None if the number is fixed."""
        self._limits, self._due = limits, True

    def set_exactness(self, exactness: Exactness) -> None:
        """Sets the engines' level of exactness."""
        self._exactness, self._due = exactness, True

    def journal(self, on: bool) -> str | None:
        """Turns journaling on or off for the next core. Returns the present core's journal, or None if it has none.

        A journal that has ended is none to a driver that turns journaling on: it is another's, and is kept only until
        the next core. Journaling ends after LEASE_S unless `renew_journal` is called.
        """
        present = self.present if isinstance(self.present, JournaledCore) else None
        written = present.journal() if present is not None and not (on and present.is_stopped) else None
        self._kind, self._due = JournaledCore, True
        self._journal_until_s = self._now() + LEASE_S
        if not on:
            self._end_journal()
        return written

    def renew_journal(self) -> None:
        """Renews the lease of a driver that wants a journal."""
        if self._journal_until_s is not None:
            self._journal_until_s = self._now() + LEASE_S

    def expire_journal(self) -> None:
        """Ends a journal whose drivers are gone, and frees its memory. No batch waits for another core because of
        it.
        """
        if self._journal_until_s is not None and self._now() > self._journal_until_s:
            self._end_journal()

    def _end_journal(self) -> None:
        self._kind, self._journal_until_s = RolloutCore, None
        if isinstance(self.present, JournaledCore):
            self.present.stop()

    def exchange(self, joined: Iterable[ReplicaJoined]) -> None:
        """Replaces the core if a setting has changed. `joined`: the last ReplicaJoined of each present replica."""
        if not self._due:
            return
        self._due = False
        self.restart(joined)

    def restart(self, joined: Iterable[ReplicaJoined]) -> None:
        """Starts a new core that knows these replicas and no batch."""
        version = self.present.replicas.weights_version
        self.present = self._kind(self._policies, version, self._limits, self._exactness)
        for event in joined:
            self.present.observe(event)
