"""A running service for one command: on an existing cluster, or on a local one made for it and shut down again.

Invariant: processes started here are stopped here, also after an error or Ctrl-C; an existing cluster stays.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from math import ceil
from pathlib import Path

from tailrace.app.calls.client import RolloutClient
from tailrace.app.config import Application, ServeFile
from tailrace.app.deployment_options import all_options
from tailrace.app.errors import BadInput, Failed, OtherCluster, StillDeploying, Unreachable
from tailrace.app.file_form import IN_CODE, in_file_form
from tailrace.app.model import resolve_model
from tailrace.app.ray_settings import UNWATCHED, unset
from tailrace.deployments.messages.roles import Role
from tailrace.deployments.staging.slots import Slots, service_name
from tailrace.policies.families.allowed_code import added_code


@contextmanager
def service(file: ServeFile, address: str | None) -> Iterator[RolloutClient]:
    """Yields a client of the service: at `address` (auto, or host:port), or of a local cluster if it is None."""
    if address is not None:
        yield connect(address, file.application.name)
        return
    resolve_model(file.application.args.engine.model)  # before Ray starts: a missing model is a quick error
    with _local_cluster(file):
        yield RolloutClient(file.application.name)


LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Settings for a cluster of one machine. With the first, Ray 2.60 calls its node 127.0.0.1 and listens there alone;
without it raylet, GCS and every worker listen on all interfaces (seen with `ss -ltn`). Serve's replica port still does.
"""


def keep_token_private(environment: Mapping[str, str]) -> None:
    """Makes the file of Ray's token readable to its owner alone: Ray 2.60 makes it readable to all users."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if path.exists() and path.stat().st_uid == os.getuid():
        path.chmod(0o600)


DEPLOY_S = 600.0
"""Maximum seconds to wait for a deployment in progress: a large model takes minutes to load."""

ANSWERS = "RUNNING", "UNHEALTHY"
"""Statuses of an application that takes calls. Serve names it unhealthy from the loss of a replica until another one
has taken its place, which may never be.
"""

CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File in which Ray records the address that `auto` means."""


def connect(address: str = "auto", app_name: str = "tailrace", role: Role | str = Role.TRAINER) -> RolloutClient:
    """Returns a client of the service on a running cluster: `auto`, or host:port of its head. `role`: see
    `RolloutClient`.

    Uses this process's Ray connection if there is one; else makes one, which requires the call to come before the first
    import of ray. Raises ConnectionError if no cluster or no such application answers, TimeoutError if the application
    is still being deployed after DEPLOY_S, ValueError if Ray is connected to another cluster than `address`.
    """
    if _ray_is_connected():
        _check_same_cluster(address)
    else:
        _connect_ray(address)
    _await_application(address, app_name)
    return RolloutClient(app_name, role=role)


def _ray_is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _check_same_cluster(address: str) -> None:
    """Raises OtherCluster if `address` is not the connected cluster's. `auto` is always it.

    A loopback host matches every host: a head's own driver may call it either way, and the port tells clusters apart.
    """
    import ray

    here = ray.get_runtime_context().gcs_address
    (host, _, port), (here_host, _, here_port) = address.rpartition(":"), here.rpartition(":")
    loopback = _is_loopback(address) or _is_loopback(here)
    if address != "auto" and (port != here_port or (host != here_host and not loopback)):
        mend = "leave the address out, or call ray.shutdown() first"
        raise OtherCluster(f"address {address}: this process is connected to the Ray cluster at {here}; {mend}")


def _connect_ray(address: str) -> None:
    if _is_loopback(address):
        os.environ.update(LOOPBACK_ONLY)  # a driver must call its node by the head's name for it
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise Unreachable(f"--address {address}: no Ray cluster answers there ({reason})") from error


def _await_application(address: str, app_name: str) -> None:
    """Waits while the application is being deployed, at most DEPLOY_S."""
    from ray import serve

    deadline = time.monotonic() + DEPLOY_S
    while True:
        application = serve.status().applications.get(app_name)
        if application is None:
            mend = "run `serve deploy serve.yaml` first"
            raise Unreachable(f"--address {address}: no application {app_name!r} there; {mend}")
        if application.status in ANSWERS:
            return
        if application.status == "DEPLOY_FAILED":
            raise Failed(f"application {app_name!r} could not be deployed: {_reason(application.message)}")
        if time.monotonic() > deadline:
            raise StillDeploying(f"application {app_name!r} is still {application.status} after {DEPLOY_S:.0f} s")
        time.sleep(0.5)


def _is_loopback(address: str) -> bool:
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or (CURRENT_CLUSTER.read_text() if CURRENT_CLUSTER.exists() else "")
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost")


def needed_cpus(application: Application) -> int:
    """Returns the whole CPU cores that hold all replicas, at least one: Serve would wait for ever for room. Draft
    models that come and go take what engines leave. Serve gives a replica a core if `num_cpus` is left out.
    """
    replicas = {"Coordinator": 1, "Engine": application.args.replicas.max}
    if application.args.drafter is not None:
        replicas["Drafter"] = application.args.drafter.replicas.min
    options = all_options(application)
    cpus = {name: options[name]["ray_actor_options"].get("num_cpus") for name in replicas}
    return max(1, ceil(sum(count * (1 if cpus[name] is None else cpus[name]) for name, count in replicas.items())))


@contextmanager
def _local_cluster(file: ServeFile) -> Iterator[None]:
    os.environ.update(LOOPBACK_ONLY | unset(UNWATCHED, os.environ))
    import ray
    from ray import serve
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False  # where Ray was imported before, it has read the variable already
    ray.init(
        address="local",
        num_cpus=needed_cpus(file.application),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="WARNING",
    )
    keep_token_private(os.environ)
    if not _is_loopback(f"{ray.util.get_node_ip_address()}:0"):
        ray.shutdown()
        raise Failed("Ray listens on all interfaces, and a local service must not: call service() before importing ray")
    logging.getLogger("ray.serve").setLevel("WARNING")
    slots = Slots(service_name(file.application.name, ray.get_runtime_context().gcs_address))
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler aborts, and leaves processes
        serve.start(proxy_location=file.proxy_location, http_options={"host": "127.0.0.1"})
        _deploy(file)
        yield
    finally:
        try:  # a second Ctrl-C ends the wait for Serve alone
            with redirect_stdout(StringIO()):  # Ray 2.60 prints there that its controller, now stopped, has ended
                serve.shutdown()
        finally:
            try:
                ray.shutdown()
            finally:
                slots.remove()  # their keeper has ended with Ray


def _deploy(file: ServeFile) -> None:
    """Deploys on the cluster that this process is connected to. Returns when the application runs."""
    if len(file.applications) > 1:  # Serve's declarative way alone
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema(**_declared_in_code(file)))
        _await_application("local", file.application.name)
        return
    from ray import serve

    from tailrace.app.build import build_from_file
    from tailrace.deployments.token_mode import TokenModeOff

    try:
        serve.run(build_from_file(file), name=file.application.name, route_prefix=None)
    except TokenModeOff as error:
        raise BadInput(str(error)) from error
    except RuntimeError as error:
        raise Failed(f"the service did not start: {_reason(str(error))}") from error


def declared(file: ServeFile) -> dict:
    """Returns the file as Serve reads it. Raises ValueError for a constant that code has changed."""
    return _in_serves_form(file, in_file_form(file))


def _declared_in_code(file: ServeFile) -> dict:
    """Returns the same with every constant, for the builder that takes them."""
    found = _in_serves_form(file, file.model_dump(mode="json"))
    found["applications"][file.applications.index(file.application)]["import_path"] = IN_CODE
    return found


def _in_serves_form(file: ServeFile, found: dict) -> dict:
    """Leaves out keys of deployments without a value, which Serve refuses. Adds the packages of the command line."""
    written = found["applications"][file.applications.index(file.application)]
    deployments = [{key: of for key, of in one.items() if of is not None} for one in written["deployments"]]
    if all(one["name"] != "Coordinator" for one in deployments) and added_code():
        deployments.append({"name": "Coordinator", "user_config": {"allowed_code": list(added_code())}})
    written["deployments"] = deployments
    return found


def _reason(report: str) -> str:
    """Returns the last line with a reason in Serve's report of a failed deployment."""
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
