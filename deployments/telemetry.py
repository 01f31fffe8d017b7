"""Tracing: one private OpenTelemetry provider per process, and a shelf of finished spans.

Invariant: a span is recorded only if its trace is sampled (the parent's flag) and it has a reader: an OTLP collector or
the shelf. Any other span costs one dictionary lookup. The shelf is bounded. The root of a trace is sampled as
OTEL_TRACES_SAMPLER says, or because its spans are kept; all spans below it follow. Called by the coordinator, the
engine replicas and the client. The context is sent as a W3C `traceparent` in our own messages, which works across
actors, threads and vLLM alike.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import INVALID_SPAN, Link, NonRecordingSpan, Span, SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# About 1 KiB per span as a dict: 200 MiB or less, and a step of 16,384 samples in 10 chunks each fits.
SHELF_SPANS = 200_000

MAX_TRACES = 1_000
"""Maximum number of traces on the shelf. One without spans, or with late ones after it was taken, would stay for
ever.
"""

SCOPE = "tailrace"

_W3C = TraceContextTextMapPropagator()
_KEPT = context.create_key("tailrace-kept")


def parse_traceparent(traceparent: str) -> SpanContext:
    """Parses a W3C `traceparent` header. Raises ValueError if it is not one."""
    context = trace.get_current_span(_W3C.extract({"traceparent": traceparent})).get_span_context()
    if not context.is_valid:
        raise ValueError(f"not a W3C traceparent: {traceparent!r}")
    return context


def traceparent(span: Span) -> str | None:
    """Returns the W3C `traceparent` of a span, for its children in other processes; None without a context."""
    own = span.get_span_context()
    return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}" if own.is_valid else None


def trace_id_of(name: str) -> str:
    """Returns the 32 hex digits of a trace that is named by its id or by a traceparent within it."""
    return name.lower() if len(name) == 32 else f"{parse_traceparent(name).trace_id:032x}"


def as_dict(span: ReadableSpan) -> dict[str, Any]:
    """Returns a finished span as plain JSON types; times are unix nanoseconds."""
    own = span.get_span_context()
    return {
        "trace_id": f"{own.trace_id:032x}",
        "span_id": f"{own.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "name": span.name,
        "kind": span.kind.name.lower(),
        "start_unix_ns": span.start_time,
        "end_unix_ns": span.end_time,
        "attributes": _plain(span.attributes),
        "events": [
            {"name": event.name, "unix_ns": event.timestamp, "attributes": _plain(event.attributes)}
            for event in span.events
        ],
        "links": [
            {
                "trace_id": f"{link.context.trace_id:032x}",
                "span_id": f"{link.context.span_id:016x}",
                "attributes": _plain(link.attributes),
            }
            for link in span.links
        ],
        "status": span.status.status_code.name.lower(),
        "status_message": span.status.description or "",
        "resource": _plain(span.resource.attributes),
    }


def _plain(attributes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in (attributes or {}).items()}


class Shelf(SpanProcessor):
    """Finished spans of the traces that are kept; when there are too many, the oldest trace is dropped."""

    def __init__(self, most_spans: int):
        self.most_spans = most_spans
        self.dropped_spans = 0
        self._traces: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()
        self._spans = 0
        self._lock = Lock()  # spans end on the engine's thread, and are taken on the event loop's

    def keep(self, trace_id: str) -> None:
        with self._lock:
            self._traces.setdefault(trace_id, [])
            while len(self._traces) > MAX_TRACES:
                self._drop_oldest(other_than=trace_id)

    def keeps(self, trace_id: str) -> bool:
        return trace_id in self._traces

    def on_end(self, span: ReadableSpan) -> None:
        trace_id = f"{span.get_span_context().trace_id:032x}"
        with self._lock:
            if trace_id not in self._traces:
                return
            while self._spans >= self.most_spans and len(self._traces) > 1:
                self._drop_oldest(other_than=trace_id)
            if self._spans >= self.most_spans:
                self.dropped_spans += 1
                return
            self._traces[trace_id].append(as_dict(span))
            self._spans += 1

    def _drop_oldest(self, other_than: str) -> None:
        oldest = next(name for name in self._traces if name != other_than)
        lost = len(self._traces.pop(oldest))
        self._spans -= lost
        self.dropped_spans += lost

    def take(self, trace_id: str) -> list[dict[str, Any]]:
        with self._lock:
            spans = self._traces.pop(trace_id, [])
            self._spans -= len(spans)
            return spans


class KeptSampler(Sampler):
    """Samples spans that are kept; `standard`, the sampler of the OTEL_* variables, decides on the others."""

    def __init__(self, standard: Sampler):
        self._standard = standard

    def should_sample(
        self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None
    ) -> SamplingResult:
        if parent_context is not None and context.get_value(_KEPT, parent_context):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, trace_state)
        about = trace_id, name, kind, attributes, links, trace_state
        return self._standard.should_sample(parent_context, *about)

    def get_description(self) -> str:
        return f"KeptSampler({self._standard.get_description()})"


def resource_of(service: str, instance: str) -> Resource:
    """Returns the process's resource with OpenTelemetry's names; OTEL_RESOURCE_ATTRIBUTES may add others."""
    try:
        release = {"service.version": version("tailrace")}
    except PackageNotFoundError:  # a checkout that was never installed
        release = {}
    about = {"service.namespace": SCOPE, "service.name": service, "service.instance.id": instance}
    return Resource.create(about | release)


class TelemetryExport(NamedTuple):
    """`spans`, `metrics`: export them over OTLP. `every_group`: see `Telemetry`."""

    spans: bool
    metrics: bool
    every_group: bool


class Telemetry:
    """Makes spans for one service. `otlp`: export them too; the exporter itself reads the OTEL_* variables.

    `instance`: names this process among those of the service; random if empty. `every_group`: all groups of a sampled
    batch have spans, see `batches/batch_spans.py`.
    """

    def __init__(
        self,
        service: str,
        otlp: bool = False,
        most_spans: int = SHELF_SPANS,
        instance: str = "",
        every_group: bool = True,
    ):
        self._otlp, self.every_group = otlp, every_group
        self._shelf = Shelf(most_spans)
        self._provider = TracerProvider(resource=resource_of(service, instance or str(uuid4())), shutdown_on_exit=otlp)
        self._provider.sampler = KeptSampler(self._provider.sampler)
        self._provider.add_span_processor(self._shelf)
        if otlp:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(SCOPE)

    @property
    def dropped_spans(self) -> int:
        """Number of spans that the full shelf has dropped."""
        return self._shelf.dropped_spans

    def keep(self, name: str) -> None:
        """Keeps on the shelf the spans of this trace (its id, or a traceparent within it) that end after this call."""
        self._shelf.keep(trace_id_of(name))

    def take(self, name: str) -> list[dict[str, Any]]:
        """Returns the spans of a trace on the shelf in the order they ended, see `as_dict`, and removes the trace."""
        return self._shelf.take(trace_id_of(name))

    def span(
        self,
        name: str,
        traceparent: str | None = None,
        start_ns: int | None = None,
        attributes: Mapping[str, Any] | None = None,
        keep: bool = False,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        parent: SpanContext | None = None,
    ) -> Span:
        """Starts a span; the caller ends it. Without a traceparent, or a `parent` of this process, it begins a trace.

        `keep` puts the trace on the shelf. A span without a reader does not record, but still passes its context on.
        """
        made = {"attributes": attributes, "start_time": start_ns, "kind": kind, "links": links}
        if traceparent is None and parent is None:
            if not (keep or self._otlp):
                return INVALID_SPAN
            span = self._tracer.start_span(name, _below(INVALID_SPAN, keep), **made)
            if keep:
                self._shelf.keep(f"{span.get_span_context().trace_id:032x}")
            return span
        parent = parent or parse_traceparent(traceparent)
        if keep:
            self._shelf.keep(f"{parent.trace_id:032x}")
        around, kept = NonRecordingSpan(parent), self._shelf.keeps(f"{parent.trace_id:032x}")
        if not parent.trace_flags.sampled or not (self._otlp or kept):
            return around
        return self._tracer.start_span(name, _below(around, kept), **made)

    def close(self) -> None:
        """Sends waiting spans to the collector."""
        self._provider.shutdown()


def _below(span: Span, kept: bool) -> context.Context:
    """Returns the context of a child of `span`, independent of the span that is current here."""
    return trace.set_span_in_context(span, context.Context({_KEPT: True} if kept else {}))
