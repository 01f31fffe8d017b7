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

MAX_GAP_S = 5.0
"""Maximum seconds that one report counts for: a snapshot that is renewed after a minute says nothing of that minute."""


class _Call:
    __slots__ = ("deadline", "quiet_s", "replica_id", "tokens")

    def __init__(self, replica_id: str, deadline: asyncio.Timeout):
        self.replica_id, self.deadline = replica_id, deadline
        self.tokens, self.quiet_s = 0, 0.0


class ChunkWatch:
    """`now`: the coordinator's clock, in seconds."""

    def __init__(self, now: Callable[[], float]):
        self._now = now
        self._calls: dict[str, _Call] = {}
        self._seen: dict[str, tuple[float, float]] = {}  # by replica: its snapshot's time by its own clock, and ours

    def __len__(self):
        return len(self._calls)

    def running(self) -> list[tuple[str, str]]:
        """(chunk id, replica id) of each call."""
        return [(chunk_id, call.replica_id) for chunk_id, call in self._calls.items()]

    async def finish(self, chunk_id: str, replica_id: str, answer: Awaitable[ChunkResult]) -> ChunkResult:
        """Returns the answer. Raises ChunkError, one line, once the chunk is given up."""
        deadline = asyncio.timeout(None)
        call = self._calls[chunk_id] = _Call(replica_id, deadline)
        try:
            async with deadline:
                return await answer
        except TimeoutError:
            if not deadline.expired():
                raise
            reason = f"chunk {chunk_id}: {replica_id} answers, but made no token of it in {call.quiet_s:.0f} s"
            raise ChunkError(reason) from None
        finally:
            del self._calls[chunk_id]

    def look(self, reports: Iterable[EngineStats]) -> None:
        """Takes the latest reports. Gives up the chunks that have made no token for long."""
        now, before = self._now(), self._seen
        renewed = {one.replica_id: one for one in reports if one.observed_at > before.get(one.replica_id, (0.0,))[0]}
        self._seen = {
            one.replica_id: (one.observed_at, now) if one.replica_id in renewed else before[one.replica_id]
            for one in reports
        }
        for chunk_id, call in self._calls.items():
            report = renewed.get(call.replica_id)
            if report is None or call.deadline.when() is not None:
                continue
            passed_s = min(now - before.get(call.replica_id, (0.0, now))[1], MAX_GAP_S)
            tokens = report.running.get(chunk_id, call.tokens)  # absent: its answer is under way, or lost
            call.quiet_s = call.quiet_s + passed_s if tokens == call.tokens else 0.0
            call.tokens = tokens
            if call.quiet_s > allowance_s(report):
                call.deadline.reschedule(asyncio.get_running_loop().time())


def allowance_s(report: EngineStats) -> float:
    """Returns the seconds that a chunk may take for its next token on this replica."""
    if report.speeds is None:
        return STALLED_S
    cache_tokens = report.kv_capacity_blocks * report.block_tokens
    return max(STALLED_S, CACHE_FILLS * cache_tokens / report.speeds["prefill_tokens_s"])
