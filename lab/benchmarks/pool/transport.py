"""Speed of bytes from one place to another on this machine: by memcpy, by a loopback socket, by the pool's store.

Every figure is the best of the repeats, on buffers that were written before. Called by kvpool.py, soak.py and
lab/benchmarks/control_plane/control_pool.py.
"""

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tailrace.kvpool.keys import PREFIX
from tailrace.kvpool.pool_config import BUFFER_MIB, PoolEndpoint

IN_FLIGHT = (1, 4, 16)
BLOCKS = 64
"""Number of blocks that a repeat puts or gets; a multiple of every entry of IN_FLIGHT."""

SOCKET_BUFFER_BYTES = 4 * 2**20
FILLER_BYTES, FILLED_SHARE = 2 * 2**20, 0.9
"""Bytes of a value, and share of the pool's memory, with which `write_everywhere` fills the pool. The master begins to
evict at a share of 0.95.
"""


def memcpy_ms(size_bytes: int, repeats: int) -> float:
    """Returns the milliseconds of a copy of `size_bytes` bytes within this process, on one core."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    return best_ms(lambda: np.copyto(target, source), repeats)


def loopback_ms(size_bytes: int, repeats: int) -> float:
    """Returns the milliseconds of `size_bytes` bytes through a TCP connection on loopback, from the first byte sent to
    the last one received.
    """
    source, target = np.ones(size_bytes, np.uint8), memoryview(np.ones(size_bytes, np.uint8))
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as there,
        server.accept()[0] as here,
        ThreadPoolExecutor(1) as sender,
    ):
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)

        def once() -> None:
            sending = sender.submit(there.sendall, source)  # runs without the interpreter's lock, as recv_into does
            got = 0
            while got < size_bytes:
                got += here.recv_into(target[got:])
            sending.result()

        return best_ms(once, repeats)


def store_rates(pool: PoolEndpoint, block_bytes: int, pieces: int, repeats: int) -> dict[str, dict[int, float]]:
    """Returns `put_mb_s` and `get_mb_s` of blocks in so many pieces, by the number of threads with a block in flight
    each.

    MB are 10**6 bytes. Raises RuntimeError, with the operation's name, when an operation fails.
    """
    from mooncake.store import ReplicateConfig

    store, place = store_client(pool), ReplicateConfig()
    place.preferred_segment = pool.segment
    memory = np.ones((BLOCKS, pieces, block_bytes // pieces), np.uint8)
    store.register_buffer(memory.ctypes.data, memory.nbytes)
    keys = [f"{PREFIX}-rates@{block}" for block in range(BLOCKS)]
    addresses = [[piece.ctypes.data for piece in block] for block in memory]
    sizes = [memory.shape[2]] * pieces

    def put(i: int) -> None:
        expect(store.batch_put_from_multi_buffers([keys[i]], [addresses[i]], [sizes], place) == [0], "put")

    def get(i: int) -> None:
        expect(store.batch_get_into_multi_buffers([keys[i]], [addresses[i]], [sizes])[0] > 0, "get")

    rates: dict[str, dict[int, float]] = {"put_mb_s": {}, "get_mb_s": {}}
    for in_flight in IN_FLIGHT:
        with ThreadPoolExecutor(in_flight) as threads:
            for name, operation in (("put_mb_s", put), ("get_mb_s", get)):
                best_s = float("inf")
                for _ in range(repeats):
                    if operation is put:
                        store.batch_remove(keys, force=True)
                    began_s = time.perf_counter()
                    list(threads.map(operation, range(BLOCKS)))
                    best_s = min(best_s, time.perf_counter() - began_s)
                rates[name][in_flight] = round(memory.nbytes / best_s / 1e6, 1)
    store.batch_remove(keys, force=True)
    store.unregister_buffer(memory.ctypes.data)
    store.close()
    return rates


def write_everywhere(pool: PoolEndpoint) -> None:
    """Fills the pool's memory and empties it again: the kernel gives a page to a store at the first write to that page.

    Raises RuntimeError when a put fails.
    """
    store, filler = store_client(pool), bytes(FILLER_BYTES)
    count = int(pool.config.dram_gib * 2**30 * FILLED_SHARE) // FILLER_BYTES
    keys = [f"{PREFIX}-filler@{number}" for number in range(count)]
    for key in keys:
        expect(store.put(key, filler) == 0, "put")
    store.batch_remove(keys, force=True)
    store.close()


def store_client(pool: PoolEndpoint):
    """Returns a Mooncake client that lends the pool no memory. Raises RuntimeError when the set-up fails."""
    from mooncake.store import MooncakeDistributedStore

    store, config = MooncakeDistributedStore(), pool.config
    buffer_bytes = (config.buffer_mib or BUFFER_MIB["cpu"]) * 2**20
    place = (config.protocol, config.rdma_devices, pool.master_address)
    expect(store.setup(pool.host, "P2PHANDSHAKE", 0, buffer_bytes, *place) == 0, "client")
    return store


def best_ms(work: Callable[[], object], repeats: int) -> float:
    times_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return round(1e3 * min(times_s), 2)


def expect(well: bool, what: str) -> None:
    if not well:
        raise RuntimeError(f"the pool's store refused a {what}")
