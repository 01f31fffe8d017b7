"""Paths of Mooncake's programs, and the ports given to them. Used by the pool's processes."""

import random
import socket
from importlib.util import find_spec
from pathlib import Path

PORTS = range(20_000, 32_000)
"""Ports above Ray's for workers and below those that Linux gives to outgoing connections: a port that was chosen free
is still free when its process is started again.
"""


def program(name: str, options: dict[str, object]) -> list[str]:
    """Returns the command line of a program in Mooncake's wheel. Raises ModuleNotFoundError without it."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the KV pool needs Mooncake: pip install mooncake-transfer-engine-non-cuda")
    return [str(Path(spec.origin).parent / name), *(f"-{key}={value}" for key, value in options.items())]


def free_port(host: str) -> int:
    """Returns a free TCP port at this address of this machine. Raises OSError if there is none."""
    for port in random.sample(PORTS, k=100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port on {host} in {PORTS.start}-{PORTS.stop}")
