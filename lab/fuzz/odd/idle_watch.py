"""A limit on waiting: no sample waits for long while a replica that it may run on is ready and idle.

It reads the books of the coordinator's core. Called by `run` every few seconds.
"""

from tailrace.lab.fuzz.cluster import SimulatedCluster
from tailrace.policies.core.sample_states import WAITING

IDLE_S = 10.0
"""Maximum seconds that a sample may wait so: the core starts a chunk at its next tick, after 0.5 s at most."""

PARKED = "KV of trajectories"
"""Begins the reason of a sample that may wait so as long as another one has begun."""


class IdleWatch:
    def __init__(self, cluster: SimulatedCluster):
        self._cluster = cluster
        self._since: dict[str, float] = {}  # samples that wait so, each with the time at which that was seen first

    def problem(self, now: float) -> str | None:
        """Returns which sample waits for too long, in one line, or None."""
        self._since = {name: self._since.get(name, now) for name in self._waiting()}
        late = next((name for name, since in self._since.items() if now > since + IDLE_S), None)
        return None if late is None else f"{late} has waited for {IDLE_S:.0f} s while a replica was ready and idle"

    def _waiting(self) -> list[str]:
        if self._cluster.coordinator is None or not self._cluster.coordinator_process.alive:
            return []
        core = self._cluster.coordinator.rollouts.core_holder.present
        if not core.counts()["waiting"]:
            return []
        idle = {name for name in core.replicas.ready() if not core.replicas.chunks(name)}
        if not idle:
            return []
        why = {sample: core.awaited.by(sample) for sample in core.samples() if sample.state is WAITING}
        parked = sum(reason.startswith(PARKED) for reason in why.values())
        counts = core.counts()
        fine = ("its ", PARKED) if counts["running"] + counts["held"] or len(why) > parked else "its "
        return [  # the reason of one that pauses begins with "its pause" or "its trial"
            f"{self._cluster.coordinators}: {sample.sample_id} {sample.chunks}"
            for sample, reason in why.items()
            if (sample.place is None or sample.place in idle) and not reason.startswith(fine)
        ]
