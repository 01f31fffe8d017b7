"""Ray's settings that save processor time, for the clusters that are started here; cluster.yaml repeats them.

Each is an environment variable that Ray reads as it starts. Invariant: one that is set already stays as it is, so each
can be undone from outside. Used by app/cluster.py and by `tailrace serve`.
"""

from collections.abc import Mapping

FRUGAL = {
    # Serve's control loop asks the GCS for all nodes each time. A replica's start, end or death, and a new number of
    # replicas, are acted on up to 0.4 s later than with Serve's 0.1 s.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # The log monitor lists the session's log files ten times a second while there are fewer than this, else
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    # this many seconds apart: the first lines of a new process reach a driver 2 s late.
    "LOG_NAME_UPDATE_INTERVAL_S": "2",
}

UNWATCHED = FRUGAL | {
    # Metrics of Ray's own for Prometheus: a cluster without a dashboard that lasts for one command has no scraper.
    "RAY_enable_metrics_collection": "false",
    # Lists of tasks, for a dashboard and `ray list tasks`.
    "RAY_task_events_report_interval_ms": "0",
}


def unset(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that the environment does not set."""
    return {name: value for name, value in settings.items() if name not in environment}
