"""Encrypted ZeroMQ sockets (CurveZMQ, RFC 26). Peers without the listener's key, which travels inside the cluster, are
ignored. Opened by the coordinator for engines, and by drafters for engines.
"""

from typing import NamedTuple

import zmq


class Address(NamedTuple):
    """Endpoint of a listener, and the public key of its socket."""

    endpoint: str
    key: bytes


def listen(socket: zmq.Socket, host: str) -> Address:
    """Binds a ROUTER to a free port of `host`, an address of this node. Returns its address."""
    public, secret = zmq.curve_keypair()
    socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public, secret
    socket.linger = 0
    host = f"[{host}]" if ":" in host else host
    socket.ipv6 = host.startswith("[")
    return Address(f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}", public)


def dial(socket: zmq.Socket, address: Address) -> None:
    """Connects a DEALER, which reconnects by itself after a break."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey, socket.linger = address.key, 0
    socket.ipv6 = "[" in address.endpoint
    socket.connect(address.endpoint)
