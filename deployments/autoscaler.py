"""Serve's autoscaling, decided by the coordinator: this module only gives Serve the number that the core wants.

Serve calls it in each turn of its controller's loop (RAY_SERVE_CONTROL_LOOP_INTERVAL_S), once for each deployment.
Invariant: it never raises (that would stall every application there), never waits, and answers for every deployment;
without a report, the present number stays. Named by `app.deployment_options`. Serve pickles this file into the
controller, so what the deployments of an application share is in `replica_wishes`, which the controller imports.
"""

from ray.serve.config import AutoscalingContext

from tailrace.deployments import replica_wishes


class ByCoordinator:
    """A deployment's policy class (`policy_function` of Serve's `AutoscalingPolicy`)."""

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict]:
        """Returns the wanted replicas of a deployment, and no state."""
        if context.deployment_name == replica_wishes.COORDINATOR:
            replica_wishes.record(context.app_name, context.raw_metrics or {})
        return replica_wishes.wanted(context.app_name, context.deployment_name, context.target_num_replicas), {}
