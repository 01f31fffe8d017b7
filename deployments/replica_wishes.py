"""The coordinators' newest reports of wanted replicas, in the process of Serve's controller.

The coordinator's record under a deployment's name (`Coordinator.record_autoscaling_stats`) is the wanted number of its
replicas. Serve gives the record to the policy of the coordinator's own deployment alone, so it is kept here for the
others. Called by `autoscaler`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

COORDINATOR = "Coordinator"

_by_application: dict[str, dict[str, int]] = {}


def record(application: str, series: Mapping[str, Mapping[Any, Sequence[Any]]]) -> None:
    """Records a coordinator's reports: by deployment and reporting replica, points with `timestamp` and `value`.

    The newest one counts: Serve's own figure is a mean over a window, and would request replicas that were never
    wanted.
    """
    newest = {}
    for deployment, by_replica in series.items():
        points = [point for reported in by_replica.values() for point in reported]
        if points:
            newest[deployment] = int(max(points, key=lambda point: point.timestamp).value)
    _by_application[application] = newest


def wanted(application: str, deployment: str, present: int) -> int:
    """Returns the wanted replicas of a deployment, or `present` if its coordinator has not reported any."""
    return _by_application.get(application, {}).get(deployment, present)
