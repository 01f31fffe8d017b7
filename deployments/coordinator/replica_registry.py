"""Registry of replicas, kept from their own reports: takes reports, gives events.

Invariant: a replica joins once per change of the weights it holds or the methods it drafts by, and leaves once. A
report from before a replica was lost never brings it back (law 8: a view is as old as its report). Called by
`Rollouts`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from tailrace.deployments.messages.chunk import EngineStats
from tailrace.policies.protocol.events import Event, ReplicaJoined, ReplicaLeft, ReplicaMeasured, TokensStreamed

LATE_S = 5.0
"""Maximum seconds that a report can be under way; a loss is remembered for as long."""


class ReplicaRegistry:
    """Replicas that have joined, with the last report of each."""

    def __init__(self):
        self.reports: dict[str, EngineStats] = {}
        self.observed_at: dict[str, float] = {}  # time of the last report, on the coordinator's clock
        self.joined: dict[str, ReplicaJoined] = {}
        self.renewed: list[EngineStats] = []  # reports that were new at the last `observe`
        self._lost_at: dict[str, float] = {}

    def lose(self, replica_id: str, now: float) -> None:
        """Removes a replica that a call found to be gone."""
        self._lost_at[replica_id] = now
        for known in (self.joined, self.reports, self.observed_at):
            known.pop(replica_id, None)

    def rejoin(self, weights_version: int, now: float) -> list[Event]:
        """Has all replicas join under another weights version, until their next reports."""
        self.joined = {
            name: replace(event, now=now, weights_version=weights_version) for name, event in self.joined.items()
        }
        return list(self.joined.values())

    def observe(
        self, reports: Iterable[tuple[EngineStats, float]], now: float, aside: Mapping[str, str] = MappingProxyType({})
    ) -> list[Event]:
        """Returns the events that follow from the latest report of each present replica and the time of that report.

        `aside`: replicas that count as lost, each with the reason.
        """
        events: list[Event] = []
        present, news = set(), []
        self.renewed = []
        for report, made_at in reports:
            if report.replica_id not in aside and self._lost_at.get(report.replica_id, -1.0) < made_at:
                present.add(report.replica_id)
                if not self._is_known(report, made_at):
                    news.append((report, made_at))
        # Serve stops the newest first.
        for report, made_at in sorted(news, key=lambda one: (one[0].started_at, one[0].replica_id)):
            events += self._report(report, made_at, now)
        for replica_id in [known for known in self.joined if known not in present]:
            reason = aside.get(replica_id, "there is no report of it any more")
            events.append(ReplicaLeft(now, replica_id, reason, took_chunk=replica_id not in aside))
            self.lose(replica_id, now)
        self._lost_at = {name: at for name, at in self._lost_at.items() if at >= now - LATE_S}
        return events

    def _is_known(self, report: EngineStats, made_at: float) -> bool:
        """Returns whether this very report has been taken already, and its replica is registered as the report says."""
        name = report.replica_id
        return (
            self.reports.get(name) is report
            and self.observed_at[name] == made_at
            and name in self.joined
            and self.joined[name].weights_version == report.weights_version
        )

    def _report(self, report: EngineStats, made_at: float, now: float) -> list[Event]:
        renewed = self.observed_at.get(report.replica_id) != made_at
        self.reports[report.replica_id] = report
        self.observed_at[report.replica_id] = made_at
        events: list[Event] = []
        known = self.joined.get(report.replica_id)
        holds = report.weights_version, report.methods
        if known is None or (known.weights_version, known.methods) != holds:
            self.joined[report.replica_id] = joined = ReplicaJoined(
                now=now,
                replica_id=report.replica_id,
                block_tokens=report.block_tokens,
                kv_capacity_blocks=report.kv_capacity_blocks,
                max_running=report.max_running,
                draft_tokens=report.draft_tokens,
                weights_version=report.weights_version,
                node_id=report.node_id,
                methods=report.methods,
                started_at=report.started_at,
            )
            events.append(joined)
        if renewed and report.performance is not None:
            performance = replace(report.performance, observed_at=made_at)
            events.append(ReplicaMeasured(now, report.replica_id, performance))
        if renewed:
            self.renewed.append(report)
        if renewed and report.running:
            events.append(TokensStreamed(now, report.running, made_at))
        return events
