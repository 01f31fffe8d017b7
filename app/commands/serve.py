"""`python -m app serve`: a Ray head on 127.0.0.1 with token authentication, and `serve deploy` of the configuration."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import click

from app.config import DEFAULT_CONFIG, load_config
from app.errors import BadInput, Failed

HOST = "127.0.0.1"


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option("--port", type=click.IntRange(1, 65_535), default=6379, show_default=True, help="Of the Ray head.")
@click.option("--dashboard-port", type=click.IntRange(1, 65_535), default=8265, show_default=True)
def command(config, port, dashboard_port):
    """Start a local cluster and deploy the service on it; drivers connect to 127.0.0.1:PORT."""
    file = load_config(config)
    for option, number in (("--port", port), ("--dashboard-port", dashboard_port)):
        _check_free(option, number)
    _resolve(file)
    root = Path(__file__).parent.parent.parent
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    dashboard = f"http://{HOST}:{dashboard_port}"
    for step in (
        ("ray", "get-auth-token", "--generate"),
        ("ray", "start", "--head", f"--node-ip-address={HOST}", f"--port={port}", f"--dashboard-host={HOST}",
         f"--dashboard-port={dashboard_port}"),
        ("serve", "deploy", "--address", dashboard, str(config.resolve())),
    ):  # fmt: skip
        _do(step, environment)
    click.echo(f"drivers connect with RAY_AUTH_MODE=token and --address {HOST}:{port}; the token is in ~/.ray")
    click.echo(f"state: RAY_AUTH_MODE=token serve status --address {dashboard}")
    click.echo("stop:  ray stop (it stops every Ray of this machine)")


def _check_free(option: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise BadInput(f"{option} {port} is in use: stop what listens there, or give another {option}") from error


def _resolve(file) -> None:
    from app.model import resolve_model

    resolve_model(file.application.args.engine.model)


def _do(step: tuple[str, ...], environment: dict[str, str]) -> None:
    """One program of this Python's environment. Raises Failed with its last line."""
    program = Path(sys.executable).parent / step[0]
    done = subprocess.run((program, *step[1:]), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise Failed(f"`{' '.join(step)}` failed: {lines[-1]}")
