"""An engine's side of the group context: sends tokens of its own samples, receives those of mates elsewhere and of
history.

Invariant: the engine never waits. Outgoing tokens are queued, and incoming tokens are ready to take. One ShardExchange
for each shard, a thread, transfers both. The caller counts its own uses of a group. Called only by the engine's
stepping thread.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.prompt_files import shard_of
from tailrace.deployments.context.shard_exchange import ShardExchange
from tailrace.deployments.context.shard_handles import ShardHandles
from tailrace.deployments.messages.context import Fetched, GroupRef
from tailrace.kvpool.counts import Counts


class ContextClient:
    """`shards`: see ensure_context. `writer`: this engine's name, unique among all engines, past and present."""

    def __init__(self, shards: ShardHandles, config: ContextConfig, writer: str):
        self._ready: deque[Fetched] = deque()
        self._new, self._counts = Counts(), Counter()
        made = (shards, config, writer, self._ready.append, self._new)
        self._exchanges = [ShardExchange(index, *made) for index in range(config.shards)]
        self._held: dict[GroupRef, ShardExchange] = {}

    def hold(self, group: GroupRef) -> None:
        """Starts to receive a group: `take` then returns all its tokens, known and new, and its history once. For a
        group that was at rest it returns only the tokens that are new since then.
        """
        if group not in self._held:  # for a group at rest the exchange knows how far it was read
            self._held[group] = self._exchanges[shard_of(group.prompt_key, len(self._exchanges))]
        self._held[group].hold(group)

    def rest(self, group: GroupRef) -> None:
        """Records that no sample of this group runs here now; its received tokens are kept in case one does again."""
        self._held[group].rest(group)

    def release(self, group: GroupRef) -> None:
        """Drops the received tokens of this group. Appended tokens are still sent."""
        self._held.pop(group).release(group)

    def append(self, group: GroupRef, sample_index: int, start: int, tokens: Sequence[int] | np.ndarray) -> None:
        """Adds tokens of a sample at answer positions from `start` on; the group must be held. The caller must not
        change them afterwards. Takes microseconds; the tokens are sent soon.
        """
        self._held[group].append(group, sample_index, start, tokens)

    def take(self) -> list[Fetched]:
        """Returns the news since the last call for groups that are held, without the tokens that this engine wrote."""
        taken = [self._ready.popleft() for _ in range(len(self._ready))]
        return [fetched for fetched in taken if fetched.group in self._held]

    def counts(self) -> dict[str, int]:
        """Returns counts since the start: tokens sent, fetched and dropped, history, exchanges by duration, failures by
        cause.
        """
        self._counts.update(self._new.take())
        return dict(sorted(self._counts.items()))

    def close(self) -> None:
        """Ends the threads; unsent tokens are lost."""
        for exchange in self._exchanges:
            exchange.close()
