"""Bits of KV blocks flipped in the pool: as bad memory does, or any host that reaches the ports of the pool.

Called by lab/verification/disturbances.py.
"""

import urllib.request
from collections.abc import Set
from functools import cache

from tailrace.kvpool.keys import is_block

PAGE_S = 5.0


def flip(master_address: str, pages_address: str, done: Set[str]) -> set[str]:
    """Flips one bit of each block that is not in `done`. Returns the keys of the changed blocks.

    `master_address`, `pages_address`: see `kvpool.status.PoolStatus`.
    """
    with urllib.request.urlopen(f"http://{pages_address}/get_all_keys", timeout=PAGE_S) as page:
        keys = page.read().decode().split()
    client = _client(master_address)
    return {key for key in keys if is_block(key) and key not in done and _flip(client, key)}


def _flip(client, key: str) -> bool:
    kept = bytearray(client.get(key))
    if not kept or client.remove(key, force=True) != 0:  # gone; reading takes a lease, hence by force
        return False
    kept[len(kept) // 2] ^= 1
    return client.put(key, bytes(kept)) == 0


@cache
def _client(master_address: str):
    """Returns a Mooncake client without memory, on the master's host."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    host = master_address.rpartition(":")[0]
    code = client.setup(host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master_address)
    if code != 0:
        raise RuntimeError(f"no client of the pool at {master_address}: Mooncake says {code}")
    return client
