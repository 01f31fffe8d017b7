"""`build(args)`: the gateway as a Serve application. `import_path` in `serve.http.yaml` names it.

It is stateless: one replica or several, which share sessions by their names in the coordinator.
"""

from ray import serve
from ray.serve import Application

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.otlp import otlp_wanted
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.metrics import exporting
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService

RESUME_S = 60.0
"""Seconds for which a request waits for a lost coordinator."""


def build(args: GatewayConfig) -> Application:
    """Returns the application."""

    def service() -> GatewayService:
        return GatewayService(lambda role: RolloutClient(args.app_name, resume_s=RESUME_S, role=role), args)

    otlp = otlp_wanted("METRICS")

    @serve.deployment(
        name="Gateway",
        num_replicas=args.replicas,
        max_ongoing_requests=args.max_open + 100,
        ray_actor_options={"num_cpus": 0},
    )
    @serve.ingress(lambda: make_app(service(), args, exporting(otlp)))
    class Gateway:
        """One replica of the gateway."""

    return Gateway.bind()
