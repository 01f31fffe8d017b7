"""Laws of tracing: nobody's spans cost nothing, the shelf is bounded, and a trace holds together."""

import http.server
import json
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tailrace.deployments.telemetry import Telemetry, parse_traceparent, trace_id_of, traceparent

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"
TRACE = PARENT[3:35]


def test_a_kept_trace_spans_services_and_is_plain_json():
    client, engine = Telemetry("client"), Telemetry("engine")
    root = client.span("batch", keep=True, attributes={"batch_id": "b"})
    header = traceparent(root)
    engine.keep(header)
    child = engine.span("engine", header, start_ns=1_000, attributes={"drafted": 3, "ids": ("a", "b")})
    child.add_event("decode", timestamp=2_000)
    child.end(3_000)
    root.end()

    (outer,), (inner,) = client.take(header), engine.take(trace_id_of(header))
    assert inner["trace_id"] == outer["trace_id"] and inner["parent_id"] == outer["span_id"]
    assert outer["parent_id"] is None and [one["resource"]["service.name"] for one in (outer, inner)] == [
        "client",
        "engine",
    ]
    assert (inner["start_unix_ns"], inner["end_unix_ns"]) == (1_000, 3_000)
    assert inner["events"] == [{"name": "decode", "unix_ns": 2_000, "attributes": {}}]
    assert json.loads(json.dumps([inner, outer])) == [inner, outer]
    assert inner["attributes"] == {"drafted": 3, "ids": ["a", "b"]}
    assert engine.take(header) == [], "the shelf forgets what was taken"


@pytest.mark.parametrize("keep, header", [(False, None), (True, UNSAMPLED), (False, PARENT)])
def test_a_span_nobody_wants_does_not_record(keep, header):
    telemetry = Telemetry("engine")
    span = telemetry.span("engine", header, keep=keep)
    assert not span.is_recording()
    span.end()
    assert telemetry.take(TRACE) == []


@pytest.mark.parametrize("header", [PARENT, UNSAMPLED])
def test_the_context_passes_through_a_span_that_does_not_record(header):
    assert traceparent(Telemetry("coordinator").span("chunk", header)) == header


def test_no_trace_has_no_traceparent():
    assert traceparent(Telemetry("client").span("batch")) is None


@pytest.mark.parametrize("bad", ["", "hello", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
def test_a_bad_traceparent_is_named(bad):
    with pytest.raises(ValueError, match="not a W3C traceparent"):
        parse_traceparent(bad)


def test_the_shelf_drops_the_oldest_trace_first_and_counts_it():
    telemetry = Telemetry("engine", most_spans=4)
    roots = [telemetry.span("batch", keep=True) for _ in range(3)]
    headers = [traceparent(root) for root in roots]
    for header in headers[:2]:
        for _ in range(2):
            telemetry.span("engine", header).end()
    assert telemetry.dropped_spans == 0
    telemetry.span("engine", headers[2]).end()
    assert [len(telemetry.take(header)) for header in headers] == [0, 2, 1]
    assert telemetry.dropped_spans == 2


def test_one_trace_alone_cannot_outgrow_the_shelf():
    telemetry = Telemetry("engine", most_spans=4)
    telemetry.keep(PARENT)
    for _ in range(9):
        telemetry.span("engine", PARENT).end()
    assert (len(telemetry.take(TRACE)), telemetry.dropped_spans) == (4, 5)
    telemetry.keep(PARENT)
    telemetry.span("engine", PARENT).end()
    assert len(telemetry.take(TRACE)) == 1, "room is given back when a trace is taken"


def test_otlp_exports_without_a_shelf(monkeypatch):
    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        telemetry = Telemetry("engine", otlp=True)
        telemetry.span("engine", PARENT).end()
        telemetry.close()
        server.shutdown()

    ((path, request),) = received
    (resource,) = request.resource_spans
    (span,) = resource.scope_spans[0].spans
    assert path == "/v1/traces" and (span.name, span.trace_id.hex()) == ("engine", TRACE)
    assert "engine" in {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
