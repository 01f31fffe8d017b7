"""Where Mooncake's programs are, and the ports given to them. Used by the pool's processes."""

import random
import socket
from importlib.util import find_spec
from pathlib import Path

PORTS = range(20_000, 32_000)
"""Above Ray's ports for workers, below those that Linux gives to outgoing connections: a port that was chosen free
is still free when its process is started again."""


def program(name: str, options: dict[str, object]) -> list[str]:
    """The command line of a program that comes with Mooncake's wheel. ModuleNotFoundError without it."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the KV pool needs Mooncake: pip install mooncake-transfer-engine-non-cuda")
    return [str(Path(spec.origin).parent / name), *(f"-{key}={value}" for key, value in options.items())]


def free_port(host: str) -> int:
    """A free TCP port at this address of this machine. Raises OSError if there is none."""
    for port in random.sample(PORTS, k=100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port on {host} in {PORTS.start}-{PORTS.stop}")
