"""An engine's side of the group context: tokens of its own samples out, those of mates elsewhere and of history in.

Invariant: the engine never waits. What it says goes into a queue, what it hears lies ready; a thread for each shard,
a Lane, does the talking. The caller counts its own uses of a group. Called by the engine's stepping thread, and by no
other.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from ray.actor import ActorHandle

from tailrace.deployments.context.archive import shard_of
from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.shard_exchange import ShardExchange
from tailrace.deployments.messages.context import Fetched, GroupRef
from tailrace.kvpool.counts import Counts


class ContextClient:
    """`shards`: see ensure_context. `writer`: this engine's name, which no other engine has or has had."""

    def __init__(self, shards: list[ActorHandle], config: ContextConfig, writer: str):
        self._ready: deque[Fetched] = deque()
        self._new, self._counts = Counts(), Counter()
        self._exchanges = [ShardExchange(shard, config, writer, self._ready.append, self._new) for shard in shards]
        self._held: dict[GroupRef, ShardExchange] = {}

    def hold(self, group: GroupRef) -> None:
        """From now on `take` gives what is known and gets known of this group, and once its history; of a group that
        was at rest, only what is new since then."""
        exchange = self._held[group] = self._exchanges[shard_of(group.prompt_key, len(self._exchanges))]
        exchange.hold(group)

    def rest(self, group: GroupRef) -> None:
        """No sample of this group runs here now; what was taken of it is kept, in case one does again."""
        self._held[group].rest(group)

    def release(self, group: GroupRef) -> None:
        """What was taken of this group is given up. What was appended is still sent."""
        self._held.pop(group).release(group)

    def append(self, group: GroupRef, sample_index: int, start: int, tokens: Sequence[int] | np.ndarray) -> None:
        """A sample of a group that is held has these tokens at answer positions from `start` on; do not change them
        any more. Microseconds; sent soon."""
        self._held[group].append(group, sample_index, start, tokens)

    def take(self) -> list[Fetched]:
        """What has come since the last time for groups that are held. Not what this engine wrote while it held them."""
        taken = [self._ready.popleft() for _ in range(len(self._ready))]
        return [fetched for fetched in taken if fetched.group in self._held]

    def counts(self) -> dict[str, int]:
        """Since the start: tokens sent, fetched and dropped, history, exchanges by duration, failures by cause."""
        self._counts.update(self._new.take())
        return dict(sorted(self._counts.items()))

    def close(self) -> None:
        """Ends the threads; what was not sent yet is not."""
        for exchange in self._exchanges:
            exchange.close()
