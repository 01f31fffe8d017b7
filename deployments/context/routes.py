"""Which exchange thread of an engine's process serves each group: that of its shard, in the newest set known here.

Invariant: a set is only replaced by a newer one. An exchange is created when its shard is first needed, and stays.
Owned by ContextClient; called by the engine's thread and those of the exchanges.
"""

import threading
from collections.abc import Callable

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.membership import Peers
from tailrace.deployments.context.shard_exchange import ShardExchange
from tailrace.deployments.context.shard_set import ShardSet, shard_of
from tailrace.deployments.messages.context import Fetched, GroupRef
from tailrace.kvpool.counts import Counts


class Routes:
    """Arguments as for ShardExchange."""

    def __init__(
        self, shards: Peers, config: ContextConfig, writer: str, deliver: Callable[[Fetched], None], counts: Counts
    ):
        self.shards = shards
        self.set = ShardSet(0, config.shards)
        self._made = (config, writer, deliver, counts)
        self._exchanges: dict[int, ShardExchange] = {}
        self._lock, self._closed = threading.Lock(), False

    def learn(self, shards: ShardSet) -> None:
        """Adopts this set, if it is newer."""
        with self._lock:
            self.set = max(self.set, shards)

    def exchange_of(self, group: GroupRef, shards: ShardSet | None = None) -> ShardExchange:
        """Returns the exchange that serves a group, in the newest set or in `shards`."""
        with self._lock:
            index = shard_of(group.prompt_key, (shards or self.set).shards)
            if index not in self._exchanges:
                self._exchanges[index] = exchange = ShardExchange(self, index, *self._made)
                if self._closed:
                    exchange.close()
            return self._exchanges[index]

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            self._closed, exchanges = True, list(self._exchanges.values())
        for exchange in exchanges:
            exchange.close()
