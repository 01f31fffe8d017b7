"""Calls of chunks under way, and the end of those whose replica answers but makes no token of them.

Invariant: seconds count against a chunk only if the replica has renewed its snapshot meanwhile. So a
load of weights, a long step or a silent replica costs a chunk next to nothing: other watchdogs look at those. Used by
`ChunkRunner`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from tailrace.deployments.messages.chunk import ChunkResult, EngineStats
from tailrace.deployments.messages.errors import ChunkError

STALLED_S = 600.0
"""Minimum seconds without a token. A chunk may wait for the prefill of all others: 1 M tokens at 10,000 tokens/s."""

CACHE_FILLS = 3
"""A chunk may also wait this many times the seconds in which its replica, as measured, prefills its whole KV cache."""

EVERY_S = 4.0
"""Seconds between looks at the chunks of one replica: its other reports are not needed for minutes without a token."""

MAX_GAP_S = 5.0
"""Maximum seconds that one report counts for: a snapshot that is renewed after a minute says nothing of that minute."""


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
        """(chunk id, replica id) of each call."""
        return [(chunk_id, replica_id) for replica_id, calls in self._calls.items() for chunk_id in calls]

    async def finish(self, chunk_id: str, replica_id: str, answer: Awaitable[ChunkResult]) -> ChunkResult:
        """Returns the answer. Raises ChunkError, one line, once the chunk is given up."""
        deadline = asyncio.timeout(None)
        calls = self._calls.setdefault(replica_id, {})
        call = calls[chunk_id] = _Call(deadline)
        try:
            async with deadline:
                return await answer
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
        """Takes the latest reports. Gives up the chunks that have made no token for long."""
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


def allowance_s(report: EngineStats) -> float:
    """Returns the seconds that a chunk may take for its next token on this replica."""
    if report.performance is None or not report.performance.prefill_token_s:
        return STALLED_S
    cache_tokens = report.kv_capacity_blocks * report.block_tokens
    return max(STALLED_S, CACHE_FILLS * cache_tokens * report.performance.prefill_token_s)
