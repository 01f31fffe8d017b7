"""Which weights the replicas are to hold, and the loads that bring them there.

Invariant: versions only grow; a replica that reports another version than the wanted one is told to load, once at a
time, for as long as it does; so one that starts late comes to the current weights before the core routes to it.
Used by `Rollouts`.
"""

import asyncio
from collections.abc import Coroutine

from tailrace.deployments.coordinator.engine_client import EngineClient
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.errors import ChunkError, ReplicaLost
from tailrace.deployments.messages.rollout import Rejected, WeightsLoaded

LOAD_S = 600.0
"""Longest wait for new weights: a large model's are read from a network folder, after a chunk's next token."""


class Weights:
    """`version` 0 is what the engines were started with."""

    def __init__(self, engines: EngineClient):
        self.version, self.source = 0, ""
        self.problem: str | None = None  # why the last load of a replica failed
        self._engines = engines
        self._loading: set[str] = set()
        self._held: dict[str, int] = {}  # replica -> version, as last reported
        self._changed = asyncio.Event()

    async def want(self, version: int, source: str) -> Rejected | None:
        """From now on this version; or why not, and nothing changes: it is old, or some replica cannot take it."""
        if version <= self.version:
            return Rejected(reason=f"weights version {version} is not above {self.version}; versions only grow")
        for reason in await self._engines.weights_refusals(source):
            if reason is not None:
                return Rejected(reason=reason)
        self._set(version, source)
        return None

    def _set(self, version: int, source: str) -> None:
        self.version, self.source, self.problem = version, source, None

    def observe(self, reports: list[EngineStats]) -> list[Coroutine]:
        """What replicas hold, by their reports; returns the loads to start. Adopts versions above its own:
        a new coordinator finds replicas that an earlier one has brought to other weights."""
        for report in reports:
            if report.weights_version > self.version:
                self._set(report.weights_version, report.weights_source)
        self._held = {report.replica_id: report.weights_version for report in reports}
        self._changed.set()
        late = [name for name, version in self._held.items() if version != self.version and name not in self._loading]
        return [self._load(replica_id) for replica_id in late]

    async def loaded(self) -> WeightsLoaded | Rejected:
        """Waits, LOAD_S at most, until every replica that reports holds the wanted version."""
        try:
            async with asyncio.timeout(LOAD_S):
                while not self._held or set(self._held.values()) != {self.version}:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            behind = sorted(name for name, version in self._held.items() if version != self.version)
            why = f"; {self.problem}" if self.problem else ""
            return Rejected(reason=f"after {LOAD_S:.0f} s {behind} do not hold weights {self.version} yet{why}")
        return WeightsLoaded(version=self.version, replicas=tuple(sorted(self._held)))

    async def _load(self, replica_id: str) -> None:
        self._loading.add(replica_id)
        try:
            await self._engines.load_weights(replica_id, self.version, self.source)
        except (ReplicaLost, ChunkError) as error:
            self.problem = f"{replica_id}: {error}"
        finally:
            self._loading.discard(replica_id)
