"""Runs chunks on replicas: an action in; an event, and a way to write the tokens down, out.

Invariant: every `StartChunk` gives exactly one event, whatever happens to its replica. Called by `Rollouts`.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from opentelemetry.trace import StatusCode

from tailrace.deployments.coordinator.live_batch import LiveBatch
from tailrace.deployments.messages.chunk import ChunkResult
from tailrace.deployments.messages.errors import ChunkError, ReplicaLost, one_line
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.protocol.actions import AbortChunk, StartChunk
from tailrace.policies.protocol.events import ChunkFailed, ChunkFinished, Event, ReplicaLeft

if TYPE_CHECKING:  # it brings Ray, which tests of this class do without
    from tailrace.deployments.coordinator.engine_client import EngineClient

Write = Callable[[], None] | None


class ChunkRunner:
    """`now`: the coordinator's clock, in seconds."""

    def __init__(self, engines: "EngineClient", telemetry: Telemetry, now: Callable[[], float]):
        self._engines, self._telemetry, self._now = engines, telemetry, now

    async def run(self, start: StartChunk, batch: LiveBatch, drafting: Drafting) -> tuple[Event, Write]:
        """Run a chunk to its end. Returns ChunkFinished with a function that writes its tokens down, or ChunkFailed or
        ReplicaLeft with None."""
        sample = batch.samples[start.sample_id]
        if sample.started_s is None:
            sample.started_s = self._now() - batch.submitted_s
        span, write = batch.chunk_span(self._telemetry, start), None
        try:
            result = await self._engines.generate(start.replica_id, batch.request(sample, start, span, drafting))
            span.set_attribute("new_tokens", len(result.token_ids))
            event = self._finished(start, result)
            write = partial(sample.append, start.start, result, start.replica_id)
        except ReplicaLost as error:
            event = ReplicaLeft(self._now(), start.replica_id, str(error))
        except ChunkError as error:
            event = ChunkFailed(self._now(), start.chunk_id, str(error))
        except Exception as error:  # noqa: BLE001 - the edge of the task: else the core believes that the chunk runs
            event = ChunkFailed(self._now(), start.chunk_id, one_line(error))
        if write is None:
            span.set_status(StatusCode.ERROR, event.error)
        span.end()
        return event, write

    def _finished(self, start: StartChunk, result: ChunkResult) -> ChunkFinished:
        drafts = result.drafts
        return ChunkFinished(
            now=self._now(),
            chunk_id=start.chunk_id,
            new_tokens=len(result.token_ids),
            end=result.end,
            weights_version=result.weights_version,
            stored_tokens=result.stored_tokens,
            drafted_tokens=result.drafted_tokens,
            accepted_tokens=result.accepted_tokens,
            model_tested=drafts.model_tested if drafts else 0,
            model_accepted=drafts.model_accepted if drafts else 0,
        )

    async def abort(self, action: AbortChunk) -> None:
        """Ask a replica to stop a chunk. The chunk's own call reports its end."""
        with contextlib.suppress(ReplicaLost, ChunkError):
            await self._engines.abort(action.replica_id, action.chunk_id, action.keep_kv)
