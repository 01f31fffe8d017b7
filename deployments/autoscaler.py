"""Serve's autoscaling, decided by the coordinator: this module only gives Serve the number that the core wants.

Serve calls it in each turn of its controller's loop (RAY_SERVE_CONTROL_LOOP_INTERVAL_S) for all deployments of the
application. Invariant: it never raises (that would stall every application there), never waits, and answers for every
deployment; without a report, the present number stays. The coordinator's record under a deployment's name
(`Coordinator.record_autoscaling_stats`) is the wanted number of its replicas; Serve carries it here. Named by
`autoscaling_policy` in `serve.yaml`.
"""

from ray.serve.config import AutoscalingContext


class AsCoordinated:
    """An application-level policy class (`policy_function` of Serve's `AutoscalingPolicy`)."""

    def __call__(self, contexts: dict) -> tuple[dict, dict]:
        """Returns the wanted replicas of each deployment by its id, and no state."""
        told = next((one.raw_metrics for one in contexts.values() if one.deployment_name == "Coordinator"), None)
        return {key: asked(told or {}, context) for key, context in contexts.items()}, {}


def asked(told: dict, context: AutoscalingContext) -> int:
    """Returns the wanted replicas in the coordinator's newest report; without one, the present number. Serve's own
    figure is a mean over a window, and would request replicas that were never wanted.
    """
    series = told.get(context.deployment_name, {}).values()
    reports = [report for points in series for report in points]
    newest = max(reports, key=lambda report: report.timestamp, default=None)
    return context.target_num_replicas if newest is None else int(newest.value)
