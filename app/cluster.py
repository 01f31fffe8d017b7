"""A running service for one command: on a cluster that is there, or on a local one made for it and taken down again.

Invariant: what was started here is stopped here, also after an error or Ctrl-C; a cluster that was there stays.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.client import RolloutClient
from app.config import ServeFile
from app.errors import BadInput, Failed
from app.model import resolve_model
from deployments.telemetry import Telemetry


@contextmanager
def service(file: ServeFile, address: str | None, telemetry: Telemetry | None = None) -> Iterator[RolloutClient]:
    """A client of the service: at `address` (auto, or host:port), or of a local cluster when it is None."""
    if address is not None:
        yield connect(address, file.application.name, telemetry)
        return
    resolve_model(file.application.args.engine.model)  # before Ray starts: a missing model is a quick error
    with _local_cluster(file):
        yield RolloutClient(file.application.name, telemetry)


LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""A cluster of one machine: with the first, Ray 2.60 calls its node 127.0.0.1 and listens there alone; without it
raylet, GCS and every worker listen on all interfaces (seen with `ss -ltn`). Serve's replica port still does."""

CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where Ray notes the address that `auto` means."""


def connect(address: str = "auto", app_name: str = "tailrace", telemetry: Telemetry | None = None) -> RolloutClient:
    """A client of the service on a running cluster: `auto`, or host:port of its head.

    Call it before anything else imports ray. Raises BadInput when no cluster, or no such application, answers.
    """
    if _is_loopback(address):
        os.environ.update(LOOPBACK_ONLY)  # a driver must call its node what the head calls it
    import ray
    from ray.serve.exceptions import RayServeException

    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise BadInput(f"--address {address}: no Ray cluster answers there ({str(error).splitlines()[0]})") from error
    try:
        return RolloutClient(app_name, telemetry)
    except RayServeException as error:
        raise BadInput(
            f"--address {address}: no application {app_name!r} runs there; run `serve deploy serve.yaml` first"
        ) from error


def _is_loopback(address: str) -> bool:
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or (CURRENT_CLUSTER.read_text() if CURRENT_CLUSTER.exists() else "")
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost")


@contextmanager
def _local_cluster(file: ServeFile) -> Iterator[None]:
    os.environ.update(LOOPBACK_ONLY)  # before Ray is imported
    import ray
    from ray import serve

    from app.build import build_from_file

    application = build_from_file(file)
    engine = file.application.of("Engine")
    needed_cpus = engine.num_replicas * (engine.ray_actor_options.num_cpus or 0)
    ray.init(
        address="local",
        num_cpus=max(1, int(needed_cpus)),
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        serve.start(proxy_location="Disabled", http_options={"host": "127.0.0.1"})
        try:
            serve.run(application, name=file.application.name, route_prefix=None)
        except RuntimeError as error:
            raise Failed(f"the service did not start: {_reason(error)}") from error
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def _reason(error: Exception) -> str:
    """The last line that says something of what Serve reports about a failed deployment."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
