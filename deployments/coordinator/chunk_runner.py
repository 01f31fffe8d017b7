"""Runs chunks on replicas: an action in, what has become of it out, as an event and a way to write it down.

Invariant: every `StartChunk` gives exactly one event, whatever happens to its replica. Called by `Rollouts`.
"""

import contextlib
from collections.abc import Callable
from functools import partial

from opentelemetry.trace import StatusCode

from tailrace.deployments.coordinator.engine_client import ChunkError, EngineClient, ReplicaLost
from tailrace.deployments.coordinator.live_batch import LiveBatch
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.families.drafting import Drafting
from tailrace.policies.protocol.actions import AbortChunk, StartChunk
from tailrace.policies.protocol.events import ChunkFailed, ChunkFinished, Event, ReplicaLeft

Write = Callable[[], None] | None


class ChunkRunner:
    """`now`: the coordinator's clock, in seconds."""

    def __init__(self, fleet: EngineClient, telemetry: Telemetry, now: Callable[[], float]):
        self._fleet, self._telemetry, self._now = fleet, telemetry, now

    async def run(self, start: StartChunk, batch: LiveBatch, drafting: Drafting) -> tuple[Event, Write]:
        """ChunkFinished with what writes its tokens down; ChunkFailed; or ReplicaLeft."""
        sample = batch.samples[start.sample_id]
        if sample.started_s is None:
            sample.started_s = self._now() - batch.submitted_s
        span = batch.chunk_span(self._telemetry, start)
        try:
            result = await self._fleet.generate(start.replica_id, batch.request(sample, start, span, drafting))
        except ReplicaLost as error:
            event, write = ReplicaLeft(self._now(), start.replica_id, str(error)), None
        except ChunkError as error:
            event, write = ChunkFailed(self._now(), start.chunk_id, str(error)), None
        else:
            count = len(result.token_ids)
            span.set_attribute("new_tokens", count)
            version, stored_tokens = result.weights_version, result.stored_tokens
            model = (result.drafts.model_tested, result.drafts.model_accepted) if result.drafts else (0, 0)
            drafts = result.drafted_tokens, result.accepted_tokens, *model
            event = ChunkFinished(self._now(), start.chunk_id, count, result.end, version, stored_tokens, *drafts)
            write = partial(sample.append, start.start, result, start.replica_id)
        if write is None:
            span.set_status(StatusCode.ERROR, event.error)
        span.end()
        return event, write

    async def abort(self, action: AbortChunk) -> None:
        with contextlib.suppress(ReplicaLost, ChunkError):  # the chunk's own call tells what has become of it
            await self._fleet.abort(action.replica_id, action.chunk_id, action.keep_kv)
