"""Reasons why waiting samples do not run, for people and for checks. Made by `RolloutCore` of its books."""

from tailrace.policies.core.failures import Failures
from tailrace.policies.core.lane_planner import LanePlanner
from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.core.trajectory_book import TrajectoryBook
from tailrace.policies.core.unassigned import UnassignedGroups


class Awaited:
    def __init__(
        self, failures: Failures, unassigned: UnassignedGroups, trajectories: TrajectoryBook, lanes: LanePlanner
    ):
        self._failures, self._unassigned, self._trajectories, self._lanes = failures, unassigned, trajectories, lanes

    def by(self, sample: Sample) -> str:
        """Returns why a waiting sample does not run."""
        if self._failures.is_paused(sample):
            return self._failures.awaited(sample)
        if sample.group in self._unassigned:
            return "a replica that is ready"
        if self._trajectories.is_parked(sample):
            return "KV of trajectories that began before"
        if sample.kept_version is not None:
            return f"room on a replica of weights {sample.kept_version}"
        if self._lanes.is_lane(sample):
            return "room on the replica of its lane"
        return "room on any replica" if sample.home is None else "room on the replica of its group"
