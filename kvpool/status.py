"""Status of the pool: values that its processes fill and the coordinator reads."""

from pydantic import BaseModel, ConfigDict


class PoolDown(Exception):
    """The pool cannot be reached now; the message is one line. A cache loss, never an error of a sample."""


class MasterAnswer(BaseModel):
    """The master's answer to a store's report."""

    model_config = ConfigDict(frozen=True)

    master_address: str
    """host:port of the master's RPC; it changes when the master's node is lost."""
    mounted: bool | None
    """True if the store's segment is mounted, or None while the master process cannot be reached."""
    may_end: bool = False
    """True if a store that leaves has nothing any more that another one could take."""


class StoreNodeStatus(BaseModel):
    """One node's store, as it reported itself."""

    model_config = ConfigDict(frozen=True)

    node_id: str
    host: str
    segment: str
    """Name of its segment; empty: not mounted now."""
    pid: int | None
    """Process id of mooncake_client; None while it is not running."""
    restarts: int
    ssd: str
    """`off`, `on`, or in one line why there is none."""
    leaving: bool = False
    """True if no engine is on its node any more: its keys move to other stores, then it ends."""


class PoolStatus(BaseModel):
    """The whole pool at one moment; bytes are those that the master has allocated."""

    model_config = ConfigDict(frozen=True)

    master_address: str
    pages_address: str
    """host:port of the master's HTTP pages, `/metrics` and `/get_all_keys` among them."""
    master_pid: int | None
    master_restarts: int
    keys: int
    dram_bytes: int
    dram_capacity_bytes: int
    ssd_bytes: int
    ssd_capacity_bytes: int
    segment_bytes: dict[str, int]
    """Allocated DRAM by segment; a segment's name begins with its host."""
    evicted_keys: int
    put_failures: int
    get_failures: int
    store_nodes: tuple[StoreNodeStatus, ...]
    left_stores: int = 0
    """Number of stores that have left since the master's actor started; their keys that moved, and those that were
    lost.
    """
    handed_keys: int = 0
    handed_bytes: int = 0
    lost_keys: int = 0
    hand_over_ms: int = 0
