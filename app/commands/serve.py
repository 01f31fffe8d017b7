"""`tailrace serve`: a local Ray head with token authentication and the service on it, until Ctrl-C.

Ray and its dashboard listen on loopback. The processes started here are stopped here, by their ids.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import NamedTemporaryFile

import click
import yaml

from tailrace.app.allow_code import allow_code_option
from tailrace.app.cluster import LOOPBACK_ONLY, declared, keep_token_private
from tailrace.app.config import DEFAULT_CONFIG, ServeFile, load_config
from tailrace.app.errors import BadInput, Failed, MissingExtra
from tailrace.app.ray_settings import FRUGAL, unset
from tailrace.app.strict_yaml import read_yaml
from tailrace.deployments.staging.slots import Slots, service_name
from tailrace.policies.families.allowed_code import added_code

LOOPBACK = "127.0.0.1"
START_S = 180.0
"""Maximum seconds to wait for the head's dashboard: 5 s on two idle cores, beyond a minute under a load of 20."""


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@click.option("--port", type=click.IntRange(1, 65_535), default=6379, show_default=True, help="Of the Ray head.")
@click.option("--dashboard-port", type=click.IntRange(1, 65_535), default=8265, show_default=True)
def command(config, port, dashboard_port):
    """Start a local cluster, deploy the service on it, and keep both until Ctrl-C."""
    from tailrace.app.model import resolve_model

    file = load_config(config)
    for option, number in (("--port", port), ("--dashboard-port", dashboard_port)):
        if _listens(number):
            raise BadInput(f"{option} {number} is in use: stop what listens there, or give another {option}")
    resolve_model(file.application.args.engine.model)
    environment = _environment()
    _run(("ray", "get-auth-token", "--generate"), environment)
    keep_token_private(environment)
    head = _start_head(port, dashboard_port, environment)
    dashboard = f"http://{LOOPBACK}:{dashboard_port}"
    try:
        _await_dashboard(head, dashboard_port)
        _deploy(file, config, dashboard, environment)
        click.echo(f"deploying; drivers: RAY_AUTH_MODE=token, --address {LOOPBACK}:{port}; the token is in ~/.ray")
        click.echo(f"state: RAY_AUTH_MODE=token serve status --address {dashboard}; Ctrl-C stops")
        head.wait()
        raise Failed(f"the Ray head has stopped with exit code {head.returncode}")
    except KeyboardInterrupt:
        click.echo("stopping", err=True)
    finally:
        try:
            _stop(head)
        finally:  # also after a second Ctrl-C: their keeper ends with Ray
            Slots(service_name(file.application.name, f"{LOOPBACK}:{port}")).remove()


def _deploy(file: ServeFile, config: Path, dashboard: str, environment: dict[str, str]) -> None:
    """Passes the file to Serve as it was read here, since Serve reads `off` and `1e-3` otherwise; or with the packages
    of --allow-code.
    """
    with NamedTemporaryFile("w", suffix=".yaml") as written:
        written.write(yaml.safe_dump(declared(file) if added_code() else read_yaml(config)))
        written.flush()
        _run(("serve", "deploy", "--address", dashboard, written.name), environment)


def _environment() -> dict[str, str]:
    ours = {"RAY_AUTH_MODE": "token", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    return os.environ | LOOPBACK_ONLY | unset(FRUGAL, os.environ) | ours


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def _program(name: str) -> str:
    """Returns a program of the environment that this Python runs in."""
    return str(Path(sys.executable).parent / name)


def _start_head(port: int, dashboard_port: int, environment: dict[str, str]) -> subprocess.Popen:
    """Starts the head in a separate process group, so that Ctrl-C reaches this process first and stopping reaches all
    of it.
    """
    arguments = (
        _program("ray"), "start", "--head", "--block", f"--port={port}", f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={dashboard_port}",
    )  # fmt: skip
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, process_group=0)


def _await_dashboard(head: subprocess.Popen, port: int) -> None:
    deadline = time.monotonic() + START_S
    while not _listens(port):
        if head.poll() is not None or time.monotonic() > deadline:
            raise Failed("the Ray head did not start; see /tmp/ray/session_latest/logs")
        time.sleep(0.2)


def _run(step: tuple[str, ...], environment: dict[str, str]) -> None:
    """Runs one program to its end. Raises Failed with its last line, MissingExtra if Ray is not installed."""
    if not Path(_program(step[0])).exists():
        raise MissingExtra("ray is not installed; run: pip install 'tailrace[cpu]'")
    done = subprocess.run((_program(step[0]), *step[1:]), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise Failed(f"`{' '.join(step)}` failed: {lines[-1]}")


def _stop(head: subprocess.Popen) -> None:
    """Ends the head, and with it every process of its cluster."""
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(START_S)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)
