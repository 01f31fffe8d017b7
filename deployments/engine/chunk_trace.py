"""The span of a chunk in its engine: how long it waited, read its context and made tokens, and the sources of its KV
and drafts.

Called by the engine's replica when a chunk has ended.
"""

from opentelemetry.trace import SpanKind

from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult
from tailrace.deployments.messages.drafts import DraftReport, by_source
from tailrace.deployments.telemetry import Telemetry


def trace_chunk(
    telemetry: Telemetry, replica_id: str, chunk: ChunkRequest, result: ChunkResult, started_ns: int
) -> None:
    """Records a chunk's span. `started_ns`: when the engine received the chunk, in unix nanoseconds. A chunk without a
    traceparent has no span.
    """
    if chunk.traceparent is None:
        return
    span = telemetry.span("engine", chunk.traceparent, started_ns, keep=chunk.keep_trace, kind=SpanKind.SERVER)
    if not span.is_recording():
        return
    span.set_attributes(attributes_of(replica_id, chunk, result))
    at_ns, version = started_ns, {"tailrace.weights.version": result.weights_version}
    for name, took_s, attributes in (
        ("queue", result.queue_s, {}),
        ("prefill", result.prefill_s, {"tailrace.tokens": result.computed_tokens, **version}),
        ("decode", result.decode_s, {"tailrace.tokens": len(result.token_ids), **version}),
    ):
        span.add_event(name, attributes, timestamp=at_ns)
        at_ns += int(took_s * 1e9)
    span.end(at_ns)


def attributes_of(replica_id: str, chunk: ChunkRequest, result: ChunkResult) -> dict[str, int | str]:
    """Returns the span's attributes, without `gen_ai.*`: the coordinator's span of the chunk has those, and tokens are
    counted once.
    """
    return {
        "tailrace.replica.id": replica_id,
        "tailrace.chunk.id": chunk.chunk_id,
        "tailrace.chunk.end": result.end.value,
        "tailrace.chunk.context_tokens": len(chunk.token_ids),
        "tailrace.chunk.new_tokens": len(result.token_ids),
        "tailrace.weights.version": result.weights_version,
        "tailrace.kv.cached_tokens": result.cached_tokens,
        "tailrace.kv.pulled_tokens": result.pulled_tokens,
        "tailrace.kv.computed_tokens": result.computed_tokens,
        "tailrace.kv.stored_tokens": result.stored_tokens,
        "tailrace.kv.recompute_cause": result.recompute_cause,
        "tailrace.draft.verifications": result.verifications,
        "tailrace.draft.drafted_tokens": result.drafted_tokens,
        "tailrace.draft.accepted_tokens": result.accepted_tokens,
        **_drafts_of(result.drafts),
    }


def _drafts_of(report: DraftReport | None) -> dict[str, int]:
    """Returns drafted and accepted tokens by source."""
    if report is None:
        return {}
    drafted, accepted = by_source(report.drafted), by_source(report.accepted)
    found = {f"tailrace.draft.drafted_tokens.{source}": tokens for source, tokens in drafted.items()}
    return found | {f"tailrace.draft.accepted_tokens.{source}": tokens for source, tokens in accepted.items()}
