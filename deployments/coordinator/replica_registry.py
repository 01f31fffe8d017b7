"""Which replicas there are, by their own reports: polls in, events out.

Invariant: a replica joins once per change of the weights it holds or the methods it drafts by, and leaves once. A
report asked for before a replica was lost never brings it back (law 8: a view is as old as its report). Called by
`Rollouts`.
"""

from dataclasses import replace

from tailrace.deployments.messages.chunk import EngineStats
from tailrace.policies.protocol.events import Event, ReplicaJoined, ReplicaLeft, ReplicaMeasured, TokensStreamed

MISSED_POLLS = 6
"""A replica that no poll has seen for about 3 s has left; one that dies in mid-chunk is known at once, by its calls."""


class ReplicaRegistry:
    """Replicas that joined, with the last report of each."""

    def __init__(self):
        self.reports: dict[str, EngineStats] = {}
        self.observed_at: dict[str, float] = {}  # when the last report was asked for, on the coordinator's clock
        self.joined: dict[str, ReplicaJoined] = {}
        self._missed: dict[str, int] = {}
        self._lost_at: dict[str, float] = {}

    def lose(self, replica_id: str, now: float) -> None:
        """A call found the replica gone."""
        self._lost_at[replica_id] = now
        for known in (self.joined, self.reports, self.observed_at, self._missed):
            known.pop(replica_id, None)

    def rejoin(self, weights_version: int, now: float) -> list[Event]:
        """All replicas join under another weights version, until their next reports."""
        self.joined = {
            name: replace(event, now=now, weights_version=weights_version) for name, event in self.joined.items()
        }
        return list(self.joined.values())

    def observe(self, reports: list[EngineStats], asked_at: float, now: float) -> list[Event]:
        """The events that follow from the answers to a poll sent at `asked_at`."""
        events: list[Event] = []
        present = set()
        for report in sorted(reports, key=lambda r: (r.started_at, r.replica_id)):  # Serve stops the newest first
            if self._lost_at.get(report.replica_id, -1.0) < asked_at:
                present.add(report.replica_id)
                events += self._report(report, asked_at, now)
        for replica_id in [i for i in self.joined if i not in present]:
            self._missed[replica_id] += 1
            if self._missed[replica_id] >= MISSED_POLLS:
                events.append(ReplicaLeft(now, replica_id, f"no answer to {MISSED_POLLS} polls"))
                self.lose(replica_id, now)
        self._lost_at = {name: at for name, at in self._lost_at.items() if at >= asked_at}  # later polls are newer
        return events

    def streamed(self) -> dict[str, int]:
        """Tokens that running chunks had made, by chunk id, as last reported."""
        return {chunk_id: n for report in self.reports.values() for chunk_id, n in report.running.items()}

    def _report(self, report: EngineStats, asked_at: float, now: float) -> list[Event]:
        self.reports[report.replica_id] = report
        self.observed_at[report.replica_id] = asked_at
        self._missed[report.replica_id] = 0
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
            )
            events.append(joined)
        if report.speeds is not None:
            events.append(ReplicaMeasured(now=now, replica_id=report.replica_id, observed_at=asked_at, **report.speeds))
        events += [TokensStreamed(now, c, tokens, asked_at) for c, tokens in report.running.items()]
        return events
