"""Sends a shard's files that now have another owner to that owner: first their groups in flight, then their history.

Invariant: contents under way are nowhere else in this process. They come back if the other shard does not acknowledge
them, and are sent again, so nothing is lost while both processes live. A receiver may get them twice. Owned by
ContextShard.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from tailrace.deployments.context.archive import Archive
from tailrace.deployments.context.live_groups import HandedGroup, LiveGroups
from tailrace.deployments.context.membership import Peers
from tailrace.deployments.context.shard_set import ShardSet
from tailrace.deployments.messages.errors import is_own_cancel

ACKNOWLEDGE_S = 60.0
"""Maximum seconds to wait for the other shard: Ray may be restarting it."""


class HandOver:
    """`on_disk`: runs work on the history's thread. `shards`: returns the present set. `owner`: returns the index of
    the shard that now owns a file, or None if it is this one. `retry_s`: pause after a failure.
    """

    def __init__(
        self,
        *,
        live: LiveGroups,
        archive: Archive,
        on_disk: Callable[[Callable], Awaitable],
        shards: Callable[[], ShardSet],
        owner: Callable[[int], int | None],
        peers: Peers | None,
        counts: Counter[str],
        retry_s: float,
    ):
        self._live, self._archive, self._on_disk = live, archive, on_disk
        self._set, self._owner = shards, owner
        self._peers, self._counts, self._retry_s = peers, counts, retry_s
        self.files: Counter[int] = Counter()  # still to send, with the number of times that each was added
        self._task: asyncio.Task | None = None

    def add(self, files: Iterable[int]) -> None:
        """Queues files that are to be sent."""
        self.files.update(files)
        if self.files and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        began_s = asyncio.get_running_loop().time()
        while self.files:
            added = dict(sorted(self.files.items()))
            try:
                await _all(self._file(file, times) for file, times in added.items())
            except (Exception, asyncio.CancelledError) as error:  # the other shard is unreachable: tried again
                if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                    raise
                self._counts[f"hand_over_failed.{type(error).__name__}"] += 1
                await asyncio.sleep(self._retry_s)
        self._task = None
        self._counts["hand_over_ms"] += round((asyncio.get_running_loop().time() - began_s) * 1000)

    async def _file(self, file: int, times: int) -> None:
        await self._groups(file)
        await self._history(file)
        if self.files[file] == times:
            del self.files[file]

    async def _groups(self, file: int) -> None:
        if (owner := self._owner(file)) is None:
            return
        groups = self._live.take_out(file)
        try:
            await self._send(owner, "take_groups", file, groups)
        except BaseException:  # after any error they are still ours
            self._live.put_in([group._replace(era=0) for group in groups], asyncio.get_running_loop().time())
            raise
        self._counts["handed_groups"] += len(groups)
        self._counts["handed_bytes"] += sum(map(HandedGroup.nbytes, groups))

    async def _history(self, file: int) -> None:
        """Sends a file's history: a file on disk is only closed, one in memory is sent."""
        if (owner := self._owner(file)) is None:
            return
        packed = await self._on_disk(lambda: self._archive.release(file))
        try:
            await self._send(owner, "take_history", file, packed)
        except BaseException:  # after any error it is still ours
            await self._on_disk(lambda: self._archive.adopt(file, packed))
            raise
        self._counts["handed_files"] += 1
        self._counts["handed_bytes"] += len(packed or b"")

    async def _send(self, owner: int, method: str, *arguments) -> None:
        try:
            call = getattr(self._peers.at(owner), method).remote(self._set(), *arguments)
            await asyncio.wait_for(_answer(call), ACKNOWLEDGE_S)
        except BaseException:  # raised again below
            self._peers.lose(owner)
            raise


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Awaits all of these. Raises the first error, after the last one has ended."""
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _answer(call):
    return await call
