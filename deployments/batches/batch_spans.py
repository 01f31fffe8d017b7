"""Spans of one batch by OpenTelemetry's conventions: one for the rollout, one for each group, one for each chunk.

A chunk is a request to a model, so its span has the names of `gen_ai.*`; all other attributes are `tailrace.*`. It
links to the chunk that it continues or copies. In a large batch only some groups have spans: the first FIRST_GROUPS,
then one in ONE_IN. All have spans if they are recorded or a standard sampler is named. Called by `LiveBatch`.
"""

from collections.abc import Iterable

from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanContext, SpanKind, StatusCode

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.rollout import BatchSettings, SamplingParams
from tailrace.deployments.telemetry import Telemetry
from tailrace.policies.protocol.actions import StartChunk

OPERATION = "text_completion"

FIRST_GROUPS, ONE_IN = 4, 64
"""Groups with spans. Tracing then costs the coordinator of a large run less than 1 %; spans of all chunks cost it 13 %
(`bench observability`).
"""


class BatchSpans:
    """`model`: the name of the target model; an adapter has its own name. Groups are named as in the core."""

    def __init__(self, telemetry: Telemetry, message: BatchSettings, model: str):
        self._telemetry, self._model = telemetry, model
        self._every = telemetry.every_group or message.keep_trace
        attributes = {"tailrace.batch.id": message.batch_id, "tailrace.step": message.step}
        self._rollout = telemetry.span(
            "rollout", message.traceparent, keep=message.keep_trace, kind=SpanKind.SERVER, attributes=attributes
        )
        self._own = self._rollout.get_span_context()
        self._groups: dict[str, Span] = {}  # spans of the groups that are sampled
        self._running: dict[str, SpanContext] = {}  # by chunk
        self._ended: dict[str, tuple[SpanContext, int]] = {}  # by sample: its longest chunk, and its tokens
        self._opened = 0

    def open_group(self, group_id: str, prompt_id: str) -> None:
        number, self._opened = self._opened, self._opened + 1
        if self._own.trace_flags.sampled and (self._every or number < FIRST_GROUPS or number % ONE_IN == 0):
            attributes = {"tailrace.prompt.id": prompt_id}
            self._groups[group_id] = self._telemetry.span("group", parent=self._own, attributes=attributes)

    def open_chunk(self, start: StartChunk, sampling: SamplingParams, adapter: str | None) -> Span:
        """Starts a chunk's span; a span that neither records nor has a context if its group has none."""
        group_id, _, index = start.sample_id.rpartition("#")
        parent = self._groups.get(group_id)
        if parent is None:
            return INVALID_SPAN
        model = adapter or self._model
        span = self._telemetry.span(
            f"{OPERATION} {model}",
            parent=parent.get_span_context(),
            attributes=_asked(start, int(index), sampling, model),
            kind=SpanKind.CLIENT,
            links=self._links(start),
        )
        if span.is_recording():
            self._running[start.chunk_id] = span.get_span_context()
        return span

    def _links(self, start: StartChunk) -> list[Link]:
        before, tokens = self._ended.get(start.sample_id, (None, 0))
        relations = {"continues": before if tokens == start.start else None, "copies": None}
        if start.copy_of:
            relations["copies"] = self._running.get(start.copy_of)
        return [Link(to, {"tailrace.link": said}) for said, to in relations.items() if to is not None]

    def end_chunk(self, span: Span, start: StartChunk, request: ChunkRequest, result: ChunkResult) -> None:
        own = self._running.pop(start.chunk_id, None)
        if own is None:
            return
        span.set_attributes(_made(request, result))
        tokens = start.start + len(result.token_ids)
        if tokens > self._ended.get(start.sample_id, (None, 0))[1]:  # else a copy was first
            self._ended[start.sample_id] = own, tokens

    def fail_chunk(self, span: Span, start: StartChunk, kind: str, error: str) -> None:
        self._running.pop(start.chunk_id, None)
        span.set_attribute("error.type", kind)
        span.set_status(StatusCode.ERROR, error)

    def close_group(self, group_id: str, sample_ids: Iterable[str]) -> None:
        """Ends the span of a group whose samples have all ended."""
        if (span := self._groups.pop(group_id, None)) is not None:
            span.end()
            for sample_id in sample_ids:
                self._ended.pop(sample_id, None)

    def close(self) -> None:
        """Ends all open spans."""
        for span in (*self._groups.values(), self._rollout):
            span.end()


def _asked(start: StartChunk, index: int, sampling: SamplingParams, model: str) -> dict:
    """Returns the attributes of a chunk at its start."""
    found = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": "tailrace",
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": start.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "tailrace.chunk.id": start.chunk_id,
        "tailrace.chunk.start": start.start,
        "tailrace.sample.index": index,
        "tailrace.replica.id": start.replica_id,
        "tailrace.weights.version": start.weights_version,
        "tailrace.reason": start.reason,
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if start.copy_of:
        found |= {"tailrace.race.copy_of": start.copy_of, "tailrace.race.method": start.method or ""}
    return found


def _made(request: ChunkRequest, result: ChunkResult) -> dict:
    """Returns the attributes of a chunk at its end."""
    return {
        "gen_ai.response.finish_reasons": (result.end.value,),
        "gen_ai.usage.input_tokens": len(request.token_ids),
        "gen_ai.usage.output_tokens": len(result.token_ids),
        "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
    }
