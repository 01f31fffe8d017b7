"""One shard's view of the set of shards. It adopts each newer set that it receives; shard 0 makes new sets.

Invariant: the newest set that any shard knows reaches all live shards, by shard 0. A shard that Ray has restarted
begins with the configured set, until it receives the present one. Owned by ContextShard.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.shard_set import ShardSet
from tailrace.deployments.messages.errors import is_own_cancel

if TYPE_CHECKING:
    from ray.actor import ActorHandle

START_S = 60.0
"""Maximum seconds to wait for the process of a new shard."""

LOOK_S = 5.0
"""Seconds between two calls of a shard to shard 0; an unwanted shard ends at the second of them."""


class NoShard(LookupError):
    """No shard has this index now."""


class Peers(Protocol):
    """The other shards, by index."""

    def at(self, index: int) -> "ActorHandle":
        """Raises NoShard if there is none."""

    def start(self, index: int) -> None:
        """Starts a shard, if it does not exist."""

    def end(self, index: int) -> None:
        """Ends a shard for good, if it exists."""

    def lose(self, index: int) -> None:
        """Drops the handle of a shard that a call found gone; it is looked up again when next needed."""


class Membership:
    """`index`: index of this shard. `peers`: None if there are none. `follow`: called with each new set."""

    def __init__(
        self,
        config: ContextConfig,
        index: int,
        peers: Peers | None,
        counts: Counter[str],
        follow: Callable[[ShardSet], None],
    ):
        self._config, self._index, self._peers = config, index, peers
        self._counts, self._follow = counts, follow
        self._resizing = asyncio.Lock()
        self.set = ShardSet(0, config.shards)

    def learn(self, shards: ShardSet) -> ShardSet:
        """Adopts a set that is newer than this shard's. Returns the newer of the two."""
        if shards > self.set:
            self.set = shards
            self._follow(shards)
        return self.set

    async def resize(self, shards: int, known: ShardSet) -> ShardSet:
        """Shard 0: changes the number of shards, at least to the configured minimum. Returns the set.

        Returns the former set if a new shard does not start.

        `known`: the caller's set, which may be newer after a restart of this shard.
        """
        async with self._resizing:
            self.learn(known)
            shards = max(shards, self._config.shards)
            for index in range(1, shards):
                self._peers.start(index)
            if not all(await asyncio.gather(*(self._show(index, START_S) for index in range(1, shards)))):
                return self.set
            former = self.set.shards
            if shards != former:
                self.learn(ShardSet(self.set.epoch + 1, shards))
                others = range(1, max(former, shards))
                await asyncio.gather(*(self._show(index, self._config.deadline_s) for index in others))
            return self.set

    def retire(self, index: int) -> None:
        """Shard 0: ends a shard that has handed everything over, if it is still not wanted."""
        if index >= self.set.shards and not self._resizing.locked():
            self._peers.end(index)
            self._counts["ended_shards"] += 1

    async def look(self, is_empty: Callable[[], bool]) -> None:
        """Exchanges sets with shard 0, which ends this shard once it is not wanted and has handed over its files.

        Returns when shard 0 has ended for good.
        """
        idle_looks = 0
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._peers.at(0)
            except NoShard:
                return
            await self._show(0, self._config.deadline_s)
            idle_looks = idle_looks + 1 if self._index >= self.set.shards and is_empty() else 0
            if idle_looks > 1:
                await self._call(0, "retire", self._index, seconds=self._config.deadline_s)

    async def _show(self, index: int, seconds: float) -> bool:
        """Exchanges shard maps with a peer and adopts a newer one. Returns whether the peer replied."""
        answer = await self._call(index, "learn", self.set, seconds=seconds)
        if answer is not None:
            self.learn(answer)
        return answer is not None

    async def _call(self, index: int, method: str, *arguments, seconds: float):
        """Returns another shard's answer, or None, counted by cause, if it does not come in time."""
        try:
            call = getattr(self._peers.at(index), method).remote(*arguments)
            return await asyncio.wait_for(_answer(call), seconds)
        except (Exception, asyncio.CancelledError) as error:  # the other shard is unreachable: asked again
            if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                raise
            self._counts[f"{method}_failed.{type(error).__name__}"] += 1
            self._peers.lose(index)
            return None


async def _answer(call):
    return await call
