"""A Ray head as `tailrace serve` starts it, with dashboard and agents, for a benchmark of all its processes.

Invariant: the head has ended when the context of `head` has. Called by lab/benchmarks/live/processes.py.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tailrace.app.cluster import declared
from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.lab.benchmarks.http.servers import free_port

END_S = 120.0
READY = "deploying;"
"""Beginning of the line that `tailrace serve` prints once the head accepts drivers."""


@contextmanager
def head(file: ServeFile, folder: Path) -> Iterator[str]:
    """Yields the address of a head with the service of `file`, which is written to `folder`.

    Raises Failed if `tailrace serve` ends before the service is deployed.
    """
    config, port = folder / "serve.yaml", free_port()
    config.write_text(yaml.safe_dump(declared(file)))
    command = [sys.executable, "-m", "tailrace", "serve", "--config", str(config), "--port", str(port)]
    command += ["--dashboard-port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        try:
            if not next((line for line in serving.stdout if line.startswith(READY)), None):
                raise Failed("`tailrace serve` ended before the service was deployed")
            yield f"127.0.0.1:{port}"
        finally:
            serving.send_signal(signal.SIGINT)
            serving.wait(END_S)
