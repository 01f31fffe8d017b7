"""What engines and the coordinator need of the shards' handles. `Shards` of actors.py has them of Ray's actors."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class NoShard(LookupError):
    """No shard has this index now."""


class ShardHandles(Protocol):
    """The shards, by index. Any thread may call."""

    def at(self, index: int) -> "ActorHandle":
        """Raises NoShard if there is none."""

    def lose(self, index: int) -> None:
        """Drops the handle of a shard that a call found gone; it is looked up again when next needed."""
