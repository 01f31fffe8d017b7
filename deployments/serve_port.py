"""Binds the port that each Serve replica opens for calls of other replicas only to its node's address.

Symptom (Ray 2.60): `ray.serve._private.replica` opens it as "[::]:0", on every interface, and unpickles its requests.
Callers use the address of the node, so that one is enough. Remove when Serve has a setting for it. Called by a
deployment's constructor, which runs before the port is opened.
"""

import ray
from ray.serve._private import replica

EVERYWHERE = "[::]:"


def keep_serve_port_on_node() -> None:
    """Patches this replica's process. Ray versions other than 2.60 are left as they are."""
    if not ray.__version__.startswith("2.60."):
        return
    add_port, host = replica.add_port_to_grpc_server, ray.util.get_node_ip_address()
    host = f"[{host}]" if ":" in host else host

    def add_here(server, address: str) -> int:
        return add_port(server, address.replace(EVERYWHERE, f"{host}:"))

    replica.add_port_to_grpc_server = add_here
