"""Mooncake's store for vLLM's connector: every block checked, every call counted, a pause after a failure.

Invariant: a call returns codes and never raises. While paused it returns at once, so that a dead store costs one slow
call per `retry_s` and not one per block. Wraps `mooncake.store.MooncakeDistributedStore`; used by the connector's
worker, from its threads.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from threading import Lock, Timer

from tailrace.kvpool.block_check import CORRUPT, BlockCheck, Register
from tailrace.kvpool.counts import Counts

PAUSED = -9999
CAUSES = {
    -200: "full",
    -704: "gone",
    -707: "lease_expired",
    -800: "store_lost",
    -900: "master_lost",
    PAUSED: "paused",
    CORRUPT: "corrupt",
}
"""Causes by Mooncake's error codes (`mooncake-store/include/types.h`) that occur in this deployment, and by our own
codes.
"""

MAX_PIECES = 500
"""Maximum number of pieces of one call. Mooncake's TCP transport (0.3.13.post1) takes 2,048 pieces for a peer, from all
threads together, and fails the rest with -800: 128 keys of 60 pieces in one call lost 94. Smaller calls were no slower
(350 MB/s).
"""

CLOSE_S = 60.0
"""Seconds after which no thread is in a call of a former client: a call takes 4.3 s with a dead master, and a transfer
up to 30 s.
"""

LOSSES = {-800, -900}  # these codes concern the pool, the others a key


class PoolStore:
    """`retry_s`: seconds without a try after a call that failed as a whole. `clock`: seconds, monotonic.

    `check`: makes the check of each block, or None. A block whose check fails is a miss, is counted and is removed.
    """

    def __init__(
        self,
        store,
        counts: Counts,
        retry_s: float,
        check: Callable[[Register], BlockCheck] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store, self._counts, self._retry_s, self._clock = store, counts, retry_s, clock
        self._paused_until_s = 0.0
        self._lock = Lock()  # between `replace` and a thread that registers memory
        self._registered: list[tuple[int, int]] = []
        self._check = None if check is None else check(self.register_buffer)

    def replace(self, store) -> None:
        """Switches to another client, of a master at another address; it registers the memory of the former one."""
        with self._lock:
            for address, size in self._registered:
                if (code := store.register_buffer(address, size)) != 0:
                    raise RuntimeError(f"the new client of the pool does not take the KV cache: Mooncake says {code}")
            former, self._store = self._store, store
        self._paused_until_s = 0.0
        closing = Timer(CLOSE_S, former.close)
        closing.daemon = True
        closing.start()

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Returns for each key 1 if it exists, 0 if not, and a code below 0 if that is unknown."""
        return self._call("lookup", self._store.batch_is_exist, keys)

    def batch_put_from_multi_buffers(self, keys: list[str], addresses, sizes, config) -> list[int]:
        """Writes blocks. Returns 0 for each key that was written; addresses and sizes [keys][pieces], in bytes."""
        results = []
        for part in parts(sizes):
            results += self._call("save", self._put, keys[part], addresses[part], sizes[part], config)
        self._count_bytes("saved_bytes", results, sizes)
        return results

    def batch_get_into_multi_buffers(self, keys: list[str], addresses, sizes) -> list[int]:
        """Reads blocks. Returns bytes read, or a code, for each key; addresses and sizes [keys][pieces], in bytes."""
        results = []
        for part in parts(sizes):
            results += self._call("load", self._get, keys[part], addresses[part], sizes[part])
        self._count_bytes("loaded_bytes", results, sizes)
        return results

    def batch_remove(self, keys: list[str]) -> None:
        self._store.batch_remove(keys, force=True)

    def register_buffer(self, address: int, size: int) -> int:
        with self._lock:
            self._registered.append((address, size))
            return self._store.register_buffer(address, size)

    def close(self) -> None:
        self._store.close()

    def _put(self, keys: list[str], addresses, sizes, config) -> list[int]:
        if self._check is not None:
            addresses, sizes = self._check.sealed(keys, addresses, sizes)
        return self._store.batch_put_from_multi_buffers(keys, addresses, sizes, config)

    def _get(self, keys: list[str], addresses, sizes) -> list[int]:
        if self._check is None:
            return self._store.batch_get_into_multi_buffers(keys, addresses, sizes)
        results = self._store.batch_get_into_multi_buffers(keys, *self._check.opened(keys, addresses, sizes))
        results = self._check.judged(keys, addresses, sizes, results)
        if corrupt := [key for key, code in zip(keys, results, strict=True) if code == CORRUPT]:
            self.batch_remove(corrupt)
        return results

    def _call(self, what: str, function: Callable, keys: list[str], *arguments) -> list[int]:
        began_s = self._clock()
        if began_s < self._paused_until_s:
            self._counts.add(f"{what}_failed.paused", len(keys))
            return [PAUSED] * len(keys)
        try:
            results = function(keys, *arguments)
        except RuntimeError as error:  # the edge to Mooncake's binding
            self._counts.add(f"{what}_failed.{type(error).__name__}", len(keys))
            results = [-900] * len(keys)
        ended_s = self._clock()
        self._counts.took(what, ended_s - began_s)
        failed = [code for code in results if code < 0]
        for code in failed:
            self._counts.add(f"{what}_failed.{CAUSES.get(code, f'code_{-code}')}")
        if not LOSSES.isdisjoint(failed):
            self._paused_until_s = ended_s + self._retry_s
        return results

    def _count_bytes(self, name: str, results: list[int], sizes) -> None:
        self._counts.add(name, sum(sum(size) for code, size in zip(results, sizes, strict=True) if code >= 0))


def parts(sizes: list[list[int]]) -> list[slice]:
    """Returns slices of the keys in order, none with more than MAX_PIECES pieces unless it is a single key."""
    cuts, pieces = [0], 0
    for i, of_key in enumerate(sizes):
        if pieces + len(of_key) + 1 > MAX_PIECES and i > cuts[-1]:
            cuts.append(i)
            pieces = 0
        pieces += len(of_key) + 1  # its check
    return [slice(begin, end) for begin, end in pairwise([*cuts, len(sizes)])]
