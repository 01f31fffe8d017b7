"""An engine's side of the group context: tokens of its own samples out, those of mates elsewhere and of history in.

Invariant: the engine never waits. Outgoing tokens are queued, incoming ones are ready to take; one ShardExchange for
each shard, a thread, transfers both. The caller
counts its own uses of a group. Called by the engine's stepping thread, and by no
other.
"""

from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.membership import Peers
from tailrace.deployments.context.routes import Routes
from tailrace.deployments.context.shard_exchange import ShardExchange
from tailrace.deployments.messages.context import Fetched, GroupRef
from tailrace.kvpool.counts import Counts


class ContextClient:
    """`shards`: see ensure_context. `writer`: this engine's name, which no other engine has or has had."""

    def __init__(self, shards: Peers, config: ContextConfig, writer: str):
        self._ready: deque[Fetched] = deque()
        self._new, self._counts = Counts(), Counter()
        self._routes = Routes(shards, config, writer, self._ready.append, self._new)
        self._held: dict[GroupRef, ShardExchange] = {}

    def hold(self, group: GroupRef) -> None:
        """From now on `take` returns all tokens of this group, known and new, and its history once. Of a group that was
        at rest it returns only those that are new since then."""
        if group not in self._held:  # the exchange of one at rest knows how far it was read
            self._held[group] = self._routes.exchange_of(group)
        self._held[group].hold(group)

    def rest(self, group: GroupRef) -> None:
        """No sample of this group runs here now; its tokens taken so far are kept, in case one does again."""
        self._held[group].rest(group)

    def release(self, group: GroupRef) -> None:
        """Forget the tokens taken of this group. Appended tokens are still sent."""
        self._held.pop(group).release(group)

    def append(self, group: GroupRef, sample_index: int, start: int, tokens: Sequence[int] | np.ndarray) -> None:
        """A sample of a group that is held has these tokens at answer positions from `start` on; do not change them
        any more. Microseconds; sent soon."""
        self._held[group].append(group, sample_index, start, tokens)

    def take(self) -> list[Fetched]:
        """News since the last call for groups that are held, without the tokens that this engine wrote meanwhile."""
        taken = [self._ready.popleft() for _ in range(len(self._ready))]
        return [fetched for fetched in taken if fetched.group in self._held]

    def counts(self) -> dict[str, int]:
        """Since the start: tokens sent, fetched and dropped, history, exchanges by duration, failures by cause."""
        self._counts.update(self._new.take())
        return dict(sorted(self._counts.items()))

    def close(self) -> None:
        """End the threads; tokens not sent yet are lost."""
        self._routes.close()
