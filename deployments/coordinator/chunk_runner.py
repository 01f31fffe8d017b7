"""Runs chunks on replicas: takes a `StartChunk`, and gives an event with the tokens that were made.

Invariant: every `StartChunk` gives exactly one event, whatever happens to its replica or to this code. Called by
`Rollouts`.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN

from tailrace.deployments.batches.live_batch import LiveBatch
from tailrace.deployments.batches.records import SampleRecord
from tailrace.deployments.coordinator.chunk_check import check_result
from tailrace.deployments.coordinator.chunk_watch import ChunkWatch
from tailrace.deployments.coordinator.loop import Loop, MadeTokens
from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.feed.acceptance import Acceptance
from tailrace.deployments.messages.adapters import digest_of
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.messages.errors import (
    REFUSED,
    ChunkError,
    ChunkNotTaken,
    ReplicaLost,
    SampleRefused,
    is_own_cancel,
    one_line,
)
from tailrace.deployments.metrics.totals import EndTotals
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.protocol.actions import AbortChunk, StartChunk
from tailrace.policies.protocol.events import ChunkFailed, ChunkFinished, Event, ReplicaLeft

if TYPE_CHECKING:  # it loads Ray, and this class needs none of it
    from tailrace.deployments.coordinator.engine_client import EngineClient


class ChunkRunner:
    """`digests`: digests of weights by version. `totals`: counts every end. `acceptance`: acceptance counts of all
    drafts. `calls`: tasks of running chunks, by chunk id.
    """

    def __init__(
        self,
        loop: Loop,
        engines: "EngineClient",
        registry: ReplicaRegistry,
        digests: Mapping[int, str],
        totals: EndTotals,
        acceptance: Acceptance,
    ):
        self._loop, self._engines, self._registry, self._digests = loop, engines, registry, digests
        self.totals, self._acceptance = totals, acceptance
        self.watch = ChunkWatch(loop.now)
        self.calls: dict[str, asyncio.Task] = {}

    def start(self, start: StartChunk, batch: LiveBatch, drafting: Drafting) -> None:
        """Starts a chunk. Its event comes with a later turn of the loop."""
        call = self.calls[start.chunk_id] = self._loop.spawn(self._call(start, batch, drafting))
        call.add_done_callback(lambda _: self.calls.pop(start.chunk_id))

    async def _call(self, start: StartChunk, batch: LiveBatch, drafting: Drafting) -> None:
        event, made = await self.run(start, batch, drafting)
        if isinstance(event, ReplicaLeft):
            self._registry.lose(start.replica_id, self._loop.now())
        self._loop.tell(event, made)

    async def run(self, start: StartChunk, batch: LiveBatch, drafting: Drafting) -> tuple[Event, MadeTokens | None]:
        """Returns ChunkFinished and its tokens; or ChunkFailed or ReplicaLeft, and None.

        Raises nothing but the CancelledError of its own task, which is cancelled once a new core has replaced the
        chunk's. Another exception that escaped would leave the chunk running for ever in the core's books.
        """
        span, made = INVALID_SPAN, None
        try:
            span = batch.chunk_span(start)
            sample = batch.samples[start.sample_id]
            if sample.started_s is None:
                sample.started_s = self._loop.now() - sample.asked_s
            request = batch.request(sample, start, span, drafting, self._digests)
            async with self.watch.over(start.chunk_id, start.replica_id):
                result = await self._engines.generate(start.replica_id, request)
            made_by = request.weights_digest, digest_of(request.adapter)
            event, made = self._finished(start, batch, sample, result, made_by)
            batch.spans.end_chunk(span, start, request, result)
        except ReplicaLost as error:
            event = ReplicaLeft(self._loop.now(), start.replica_id, str(error), not isinstance(error, ChunkNotTaken))
        except SampleRefused as error:
            reason = str(error).removeprefix("RequestRefused: ").removeprefix(f"chunk {start.chunk_id}: ")
            event = ChunkFailed(self._loop.now(), start.chunk_id, f"{REFUSED}{reason}", of_sample=True)
        except ChunkError as error:
            event = ChunkFailed(self._loop.now(), start.chunk_id, str(error))
        except (Exception, asyncio.CancelledError) as error:  # the edge of the task: the core must receive every end
            if isinstance(error, asyncio.CancelledError) and is_own_cancel():
                raise
            event, made = ChunkFailed(self._loop.now(), start.chunk_id, one_line(error)), None
        if made is None:
            self.totals.chunk_failed(lost=isinstance(event, ReplicaLeft))
            batch.spans.fail_chunk(span, start, type(event).__name__, event.error)
        span.end()
        return event, made

    def _finished(
        self, start: StartChunk, batch: LiveBatch, sample: SampleRecord, result: ChunkResult, digests: tuple[str, str]
    ) -> tuple[ChunkFinished, MadeTokens]:
        check_result(start, result, len(sample.prompt))
        self.totals.chunk_came(result)
        drafts = result.drafts
        self._acceptance.add(drafts)
        event = ChunkFinished(
            now=self._loop.now(),
            chunk_id=start.chunk_id,
            new_tokens=len(result.token_ids),
            end=result.end,
            weights_version=result.weights_version,
            stored_tokens=result.stored_tokens,
            drafted_tokens=result.drafted_tokens,
            accepted_tokens=result.accepted_tokens,
            model_tested=drafts.model_tested if drafts else 0,
            model_accepted=drafts.model_accepted if drafts else 0,
            verifications=result.verifications,
            pulled_tokens=result.pulled_tokens,
            computed_tokens=result.computed_tokens,
            tested_tokens=min(drafts.tested, result.drafted_tokens) if drafts else 0,
        )
        return event, MadeTokens(batch, sample, start, result, digests)

    def abort(self, action: AbortChunk) -> None:
        """Asks a replica to end a chunk early. Errors are dropped, since the chunk's own call reports its end."""
        self._loop.spawn(self._abort(action))

    async def _abort(self, action: AbortChunk) -> None:
        with contextlib.suppress(Exception):  # the replica may be lost, or Ray may fail
            await self._engines.abort(action.replica_id, action.chunk_id, action.keep_kv)
