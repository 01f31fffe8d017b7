"""The driver's spans of its batches, and the traces that it may take back."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import SpanKind

from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.telemetry import MAX_TRACES, Telemetry, traceparent


class DriverSpans:
    """`telemetry`: the process's."""

    def __init__(self, telemetry: Telemetry):
        self._telemetry = telemetry
        self._traces: dict[str, str] = {}  # batch id -> trace id, of batches whose spans are kept

    @contextmanager
    def span(self, batch: RolloutBatch) -> Iterator[RolloutBatch]:
        """Opens the span of a batch. Yields the batch with the span as its parent."""
        attributes = {"id": batch.batch_id, "groups": len(batch.groups)}
        attributes = {f"tailrace.batch.{name}": value for name, value in attributes.items()}
        span = self._telemetry.span(
            "driver",
            batch.traceparent,
            attributes={**attributes, "tailrace.step": batch.step},
            keep=batch.keep_trace,
            kind=SpanKind.CLIENT,
        )
        if batch.keep_trace:
            self._traces[batch.batch_id] = f"{span.get_span_context().trace_id:032x}"
            if len(self._traces) > MAX_TRACES:
                del self._traces[next(iter(self._traces))]
        try:
            yield batch.model_copy(update={"traceparent": traceparent(span) or batch.traceparent})
        finally:
            span.end()

    def take(self, batch_id: str) -> tuple[str, list[dict]]:
        """Removes and returns the trace id and the driver's spans of a batch. Raises KeyError if they were not kept."""
        trace_id = self._traces.pop(batch_id)
        return trace_id, self._telemetry.take(trace_id)
