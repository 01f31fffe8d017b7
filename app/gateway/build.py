"""`build(args)`: the gateway as a Serve application. `import_path` in `serve.http.yaml` names it.

Its replicas, one or several, share sessions by their names in the coordinator. Earlier chats are kept by the replica
that answered them, uploads of weights by the one that their rank has joined. Serve starts, checks and replaces
replicas; callers connect to their own port.
"""

from functools import partial

from ray import serve
from ray.serve import Application

from tailrace.app.calls.client import RolloutClient
from tailrace.app.calls.line_connection import LineConnection
from tailrace.app.calls.otlp import otlp_wanted
from tailrace.app.gateway.gateway_config import GatewayConfig
from tailrace.app.gateway.gateway_port import GatewayPort
from tailrace.app.gateway.metrics import exporting
from tailrace.app.gateway.routes import make_app
from tailrace.app.gateway.service import GatewayService
from tailrace.deployments.serve_port import keep_serve_port_on_node

RESUME_S = 60.0
"""Seconds for which a request waits for a lost coordinator."""

ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray's own resource of the head node, whose address the port has."""


@serve.deployment(
    name="Gateway", graceful_shutdown_wait_loop_s=0.2, ray_actor_options={"num_cpus": 0, "resources": ON_HEAD}
)
class Gateway:
    """One replica of the gateway. `otlp`: it sends its figures to a collector."""

    async def __init__(self, args: GatewayConfig, otlp: bool):
        keep_serve_port_on_node()
        client = partial(RolloutClient, args.app_name, resume_s=RESUME_S, connect=LineConnection)
        self._service = GatewayService(lambda role: client(role=role), args)
        app = make_app(self._service, args, exporting(otlp))
        self._port = await GatewayPort.opened(app, args.host, args.port)

    async def check_health(self) -> None:
        """Raises RuntimeError if the port is closed, or if the service has another model than at the first request.
        Serve then replaces the replica.
        """
        self._port.check()
        await self._service.check_model()

    async def __del__(self):
        await self._port.close()


def build(args: GatewayConfig) -> Application:
    """Returns the application."""
    return Gateway.options(num_replicas=args.replicas).bind(args, otlp_wanted("METRICS"))
