"""Watches calls of chunks, and ends those whose replica answers but makes no token for them.

Invariant: seconds count against a chunk only if its replica has renewed its snapshot meanwhile. A load of weights, a
long step or a silent replica therefore costs a chunk next to nothing; other watchdogs handle those. Used by
`ChunkRunner`; `orphans` by `Rollouts`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import asynccontextmanager

from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.errors import ChunkError
from tailrace.policies.protocol.actions import AbortChunk

STALLED_S = 600.0
"""Minimum seconds without a token before a chunk is given up. A chunk may wait for the prefill of all others: 1 M
tokens at 10,000 tokens/s.
"""

CACHE_FILLS = 3
"""Number of cache fills that a chunk may wait for. One fill is the time in which its replica, as measured, prefills its
whole KV cache.
"""

EVERY_S = 4.0
"""Seconds between checks of one replica's chunks; a chunk is given up only after minutes, so further reports are
skipped.
"""

MAX_GAP_S = 5.0
"""Maximum seconds that one report counts for: a snapshot that is renewed after a minute shows nothing of that
minute.
"""


class _Call:
    __slots__ = ("deadline", "quiet_s", "tokens")

    def __init__(self, deadline: asyncio.Timeout):
        self.deadline, self.tokens, self.quiet_s = deadline, 0, 0.0


class ChunkWatch:
    """`now`: the coordinator's clock, in seconds."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._calls: dict[str, dict[str, _Call]] = {}  # by replica and chunk
        self._seen: dict[str, tuple[float, float]] = {}  # by replica: its snapshot's time by its own clock, and ours

    def __len__(self):
        return sum(map(len, self._calls.values()))

    def running(self) -> list[tuple[str, str]]:
        """Returns (chunk id, replica id) of each call."""
        return [(chunk_id, replica_id) for replica_id, calls in self._calls.items() for chunk_id in calls]

    @asynccontextmanager
    async def over(self, chunk_id: str, replica_id: str) -> AsyncIterator[None]:
        """Watches a chunk while the body waits for its result. Raises ChunkError, one line, once it is given up."""
        deadline = asyncio.timeout(None)
        calls = self._calls.setdefault(replica_id, {})
        call = calls[chunk_id] = _Call(deadline)
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"chunk {chunk_id}: {replica_id} answers, but made no token of it in {call.quiet_s:.0f} s"
            raise ChunkError(reason) from None
        finally:
            del calls[chunk_id]
            if not calls and self._calls.get(replica_id) is calls:
                del self._calls[replica_id]

    def look(self, reports: Iterable[EngineStats]) -> None:
        """Takes the latest reports and gives up the chunks that have made no token for too long."""
        now, present = self._now(), set()
        for report in reports:
            present.add(report.replica_id)
            made_at, looked_at = self._seen.get(report.replica_id, (0.0, now - EVERY_S))
            if report.observed_at > made_at and now >= looked_at + EVERY_S:
                passed_s = min(now - looked_at, MAX_GAP_S) if report.replica_id in self._seen else 0.0
                self._seen[report.replica_id] = report.observed_at, now
                self._look_at(report, passed_s)
        for gone in self._seen.keys() - present:
            del self._seen[gone]

    def _look_at(self, report: EngineStats, passed_s: float) -> None:
        allowed_s = allowance_s(report)
        for chunk_id, call in self._calls.get(report.replica_id, {}).items():
            tokens = report.running.get(chunk_id, call.tokens)  # absent: its answer is under way, or lost
            call.quiet_s = call.quiet_s + passed_s if tokens == call.tokens else 0.0
            call.tokens = tokens
            if call.quiet_s > allowed_s and call.deadline.when() is None:
                call.deadline.reschedule(asyncio.get_running_loop().time())


def orphans(
    reports: Iterable[EngineStats], calls: Container[str], is_running: Callable[[str], bool]
) -> Iterator[AbortChunk]:
    """Yields the stops of chunks that have no caller: an earlier coordinator started them, or their call was lost. Also
    of those that the core no longer runs there, because their replica was silent for too long.
    """
    for report in reports:
        for chunk_id in report.running:
            if chunk_id in calls and is_running(chunk_id):
                continue
            yield AbortChunk(chunk_id, report.replica_id, False, "its caller is gone")


def allowance_s(report: EngineStats) -> float:
    """Returns the maximum seconds that a chunk may take for its next token on this replica."""
    if report.performance is None or not report.performance.prefill_token_s:
        return STALLED_S
    cache_tokens = report.kv_capacity_blocks * report.block_tokens
    return max(STALLED_S, CACHE_FILLS * cache_tokens * report.performance.prefill_token_s)
