"""Serve's autoscaling, decided by the coordinator: this only hands Serve what `policies.tail` wants.

Serve calls it in its controller about ten times a second for all deployments of the application. Invariant: it never
raises (that would stall every application there), never waits, and answers for every deployment it is asked about;
where nothing has been said, what there is stays. Named by `autoscaling_policy` in `serve.yaml`.
"""

from ray.serve.config import AutoscalingContext

METRIC = "engine_replicas"
"""How many there should be: `Coordinator.record_autoscaling_stats` reports it, Serve carries it here."""


class AsCoordinated:
    """An application-level policy class (`policy_function` of Serve's `AutoscalingPolicy`)."""

    def __call__(self, contexts: dict) -> tuple[dict, dict]:
        """Replicas of each deployment by its id, and no state."""
        wanted = {context.deployment_name: asked(context) for context in contexts.values()}
        engines = wanted.get("Coordinator")
        return {
            key: engines if context.deployment_name == "Engine" and engines is not None else context.target_num_replicas
            for key, context in contexts.items()
        }, {}


def asked(context: AutoscalingContext) -> int | None:
    """The newest report of a deployment's replicas; None: there is none. Serve's own figure is a mean over a window,
    which would ask for replicas that nobody has wanted."""
    series = (context.raw_metrics or {}).get(METRIC, {}).values()
    reports = [report for points in series for report in points]
    return int(max(reports, key=lambda report: report.timestamp).value) if reports else None
