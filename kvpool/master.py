"""KvMaster: the actor that runs mooncake_master and holds the admin client (signatures first)."""

from kvpool.config import PoolConfig
from kvpool.status import PoolStatus


class KvMaster:
    """Each operation raises PoolDown, in one line, while the master process cannot be reached."""

    def __init__(self, config: PoolConfig, app_name: str, host: str, rpc_port: int, metrics_port: int):
        raise NotImplementedError

    async def release(self, keys: list[str]) -> int:
        """Forget these keys at once, leases or not; how many there were."""

    async def retire(self, regex: str) -> int:
        """Forget all keys that match (ECMAScript syntax, whole key not implied); how many there were."""

    async def move(self, keys: list[str], segment: str) -> int:
        """Move these keys' DRAM copies to a segment, in the background; how many were accepted."""

    async def demote(self, keys: list[str]) -> int:
        """Drop the DRAM copy of keys that have an SSD copy; how many were dropped."""

    async def status(self) -> PoolStatus:
        """Counts and bytes now."""
