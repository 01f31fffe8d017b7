"""The coordinator's side of the KV pool under watch: its names are compared at once with those that engines wrote.

Laws: an engine wrote each name that is released or moved; a sample's own blocks belong to no mate; in a run without
faults everything is released in time, and a sweep finds nothing. It replaces the real one, from which it inherits.
"""

from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.coordinator.kv_pool_manager import KvPoolManager
from tailrace.kvpool.keys import NAME_BYTES
from tailrace.policies.protocol.actions import ReleaseKv


class WatchedPool(KvPoolManager):
    """The pool. `written`: names that engines have written so far. `defects`: defects of the run, to which a breach is
    added."""

    def __init__(self, master, written: set[bytes], defects: list[str]):
        super().__init__(master)
        self._written, self._defects = written, defects
        self._mates: set[bytes] = set()  # names of the mates of the sample that is released now

    def release(self, batch: LiveBatch, action: ReleaseKv) -> None:
        if action.sample_id is not None:
            own = batch.samples[action.sample_id]
            mates = [one for one in batch.groups[action.group_id].samples if one.index != own.index]
            self._mates = {name for mate in mates for name in _names(mate.kv_names)}
        super().release(batch, action)
        self._mates = set()

    @property
    def swept(self) -> int:
        """Number of keys that sweeps have removed."""
        return self._counts["swept_keys"]

    def _do(self, method: str, names: bytes, *rest) -> None:
        for name in _names(names):
            if name not in self._written:
                self._defects.append(f"{method} of KV that no engine has written: {name.hex()}")
            if name in self._mates:
                self._defects.append(f"{method} of a sample's KV that a mate has, too: {name.hex()}")
        super()._do(method, names, *rest)


def _names(joined: bytes) -> list[bytes]:
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]
