"""Laws of a batch's spans: names by the conventions, a link from each chunk to the one it continues, OTLP JSON that is
the same as the official encoder's, sampling by the standard variables, and one whole trace through a collector."""

import base64
import gzip
import http.server
import json
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes
from test_chunk_runner import RESULT, START

from tailrace.app.files.otlp_json import traces_data
from tailrace.deployments.batches.batch_spans import FIRST_GROUPS, ONE_IN, BatchSpans
from tailrace.deployments.engine.chunk_trace import trace_chunk
from tailrace.deployments.messages.chunk import ChunkRequest, KvPlan
from tailrace.deployments.messages.rollout import BatchSettings, SamplingParams
from tailrace.deployments.telemetry import Telemetry, traceparent

AGENT = Path(__file__).parents[2] / ".venv-collector" / "rotel" / "rotel-agent"
"""`make tools` installs it there."""

SAMPLING = SamplingParams(temperature=0.7, top_k=5)


def request_of(start, header: str | None) -> ChunkRequest:
    return ChunkRequest(
        chunk_id=start.chunk_id, sample_key=1, token_ids=[7] * (3 + start.start), prompt_tokens=3,
        max_tokens=start.max_tokens, sampling=SAMPLING, weights_version=3, weights_digest="",
        kv=KvPlan(3, None, False, ""), traceparent=header, keep_trace=True,
    )  # fmt: skip


def step(spans: BatchSpans, engine: Telemetry, number: int, tokens: int = 2, **start):
    """One chunk of sample b/p#0 from its start to its end, as coordinator and engine trace it."""
    begun = replace(START, chunk_id=f"b/p#0:{number}", **start)
    span = spans.open_chunk(begun, SAMPLING, None)
    request = request_of(begun, traceparent(span))
    result = replace(RESULT, chunk_id=begun.chunk_id, token_ids=RESULT.token_ids[:tokens], cached_tokens=begun.start)
    trace_chunk(engine, begun.replica_id, request, result, time.time_ns())
    return begun, span, request, result


def traced(keep: bool = True, coordinator: Telemetry | None = None, engine: Telemetry | None = None) -> list[dict]:
    """The kept spans of one sample: a chunk, one that continues it and a copy that is first, then one that failed."""
    coordinator, engine = coordinator or Telemetry("tailrace-coordinator"), engine or Telemetry("tailrace-engine")
    driver = coordinator.span("driver", keep=keep)
    header = traceparent(driver)
    spans = BatchSpans(coordinator, BatchSettings(batch_id="b", traceparent=header, keep_trace=keep), "demo")
    spans.open_group("b/p", "p")
    start, span, *made = step(spans, engine, 0)
    spans.end_chunk(span, start, *made)
    span.end()
    owner, owners_span, *owners = step(spans, engine, 1, 1, start=2)
    copy, copys_span, *copys = step(spans, engine, 2, 2, start=2, copy_of=owner.chunk_id, method="suffix")
    spans.end_chunk(copys_span, copy, *copys)
    spans.end_chunk(owners_span, owner, *owners)
    last, lasts_span, *_ = step(spans, engine, 3, start=4)
    spans.fail_chunk(lasts_span, last, "ReplicaLeft", "it died")
    for one in (owners_span, copys_span, lasts_span):
        one.end()
    spans.close_group("b/p", ["b/p#0"])
    spans.close()
    driver.end()
    return coordinator.take(header) + engine.take(header) if header and keep else []


@pytest.fixture(scope="module")
def spans() -> list[dict]:
    return traced()


def test_names_are_those_of_the_conventions_or_our_own(spans):
    standard = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    standard |= {error_attributes.ERROR_TYPE}
    names = {name for span in spans for name in span["attributes"]}
    names |= {name for span in spans for one in (*span["events"], *span["links"]) for name in one["attributes"]}
    assert {name for name in names if not name.startswith("tailrace.")} <= standard
    assert {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.usage.cache_read.input_tokens"} <= names
    kinds = {span["name"]: span["kind"] for span in spans}
    assert kinds == {
        "driver": "internal", "rollout": "server", "group": "internal", "text_completion demo": "client",
        "engine": "server",
    }  # fmt: skip
    for span in spans:
        assert span["resource"]["service.namespace"] == "tailrace" and span["resource"]["service.instance.id"]
    assert len({span["resource"]["service.instance.id"] for span in spans}) == 2


def test_tokens_are_counted_once(spans):
    usage = [
        s["attributes"]["gen_ai.usage.output_tokens"] for s in spans if "gen_ai.usage.output_tokens" in s["attributes"]
    ]
    assert usage == [2, 1, 2] or sorted(usage) == [1, 2, 2]
    assert not [name for span in spans if span["name"] == "engine" for name in span["attributes"] if "gen_ai" in name]


def test_a_chunk_leads_to_the_one_it_continues_or_copies(spans):
    chunks = {s["attributes"]["tailrace.chunk.id"]: s for s in spans if s["kind"] == "client"}
    by_id = {span["span_id"]: span["attributes"] for span in spans}
    found = {
        name.rpartition(":")[2]: {
            link["attributes"]["tailrace.link"]: by_id[link["span_id"]]["tailrace.chunk.id"].rpartition(":")[2]
            for link in span["links"]
        }
        for name, span in chunks.items()
    }
    assert found == {"0": {}, "1": {"continues": "0"}, "2": {"continues": "0", "copies": "1"}, "3": {"continues": "2"}}
    failed = chunks["b/p#0:3"]
    assert (failed["status"], failed["status_message"]) == ("error", "it died")
    assert failed["attributes"]["error.type"] == "ReplicaLeft"


def as_message(data: dict) -> ExportTraceServiceRequest:
    """By protobuf's own reader of JSON, which refuses unknown fields; ids are base64 there, and hex in OTLP."""
    data = json.loads(json.dumps(data))
    for resource in data["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in (*scope["spans"], *(link for one in scope["spans"] for link in one["links"])):
                for name in {"traceId", "spanId", "parentSpanId"} & set(span):
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return ParseDict(data, ExportTraceServiceRequest())


def sorted_spans(message: ExportTraceServiceRequest) -> list[tuple[str, bytes]]:
    """Every span with the service that made it; without flags, which JSON files need not hold."""
    found = []
    for resource in message.resource_spans:
        service = sorted(resource.resource.attributes, key=lambda a: a.key)
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            span.ClearField("flags")
            for link in span.links:
                link.ClearField("flags")
            attributes = sorted(span.attributes, key=lambda a: a.key)
            del span.attributes[:]
            span.attributes.extend(attributes)
            found.append((str(service), span.SerializeToString(deterministic=True)))
    return sorted(found)


def test_the_json_is_the_official_encoders():
    seen = InMemorySpanExporter()
    coordinator, engine = Telemetry("tailrace-coordinator"), Telemetry("tailrace-engine")
    for telemetry in (coordinator, engine):
        telemetry._provider.add_span_processor(SimpleSpanProcessor(seen))
    kept = traced(coordinator=coordinator, engine=engine)
    theirs = encode_spans(seen.get_finished_spans())
    assert len(kept) == 11
    assert sorted_spans(as_message(traces_data(kept))) == sorted_spans(theirs)
    assert {s.scope.name for r in theirs.resource_spans for s in r.scope_spans} == {"tailrace"}


def test_of_a_great_batch_some_groups_have_spans_unless_all_are_kept_or_a_sampler_is_named():
    def recorded(keep: bool, every: bool) -> list[int]:
        telemetry = Telemetry("tailrace-coordinator", every_group=every)
        driver = telemetry.span("driver", keep=True)
        message = BatchSettings(batch_id="b", traceparent=traceparent(driver), keep_trace=keep)
        spans = BatchSpans(telemetry, message, "demo")
        found = []
        for number in range(100):
            spans.open_group(f"b/{number}", str(number))
            start = replace(START, chunk_id=f"b/{number}#0:0", sample_id=f"b/{number}#0")
            found += [number] if traceparent(spans.open_chunk(start, SAMPLING, None)) else []
        return found

    some = [n for n in range(100) if n < FIRST_GROUPS or n % ONE_IN == 0]
    assert recorded(False, False) == some and len(some) < 12
    assert recorded(True, False) == recorded(False, True) == list(range(100))


@contextmanager
def receiver():
    """The address of an OTLP/HTTP receiver, and the requests that it gets."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
            if self.path == "/v1/traces":
                requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()  # also where a test is skipped: a thread that serves a closed socket is never idle


@pytest.mark.parametrize(
    ("sampler", "argument", "exported"),
    [(None, None, 11), ("always_off", None, 0), ("parentbased_always_on", None, 11), ("traceidratio", "0", 0),
     ("parentbased_traceidratio", "0", 0), ("parentbased_traceidratio", "1", 11)],
)  # fmt: skip
def test_the_standard_variables_sample(sampler, argument, exported, monkeypatch):
    for name, value in (("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with receiver() as (address, requests):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        services = Telemetry("tailrace-coordinator", otlp=True), Telemetry("tailrace-engine", otlp=True)
        traced(False, *services)
        for telemetry in services:
            telemetry.close()
    assert sum(len(sorted_spans(request)) for request in requests) == exported


def test_a_trace_that_is_kept_is_whole_whatever_the_sampler(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert len(traced()) == 11


@pytest.mark.parametrize("value", [True, 7, -(2**62), 0.5, "text", ("a", "b"), [1, 2]])
def test_a_value_keeps_its_type(value):
    telemetry = Telemetry("x")
    span = telemetry.span("s", keep=True, attributes={"a": value})
    header = traceparent(span)
    span.end()
    data = traces_data(telemetry.take(header))
    (said,) = as_message(data).resource_spans[0].scope_spans[0].spans[0].attributes
    kind = said.value.WhichOneof("value")
    found = getattr(said.value, kind)
    if kind == "array_value":
        found = [getattr(one, one.WhichOneof("value")) for one in found.values]
        value = list(value)
    assert found == value and type(found) is type(value)


# ---- through a collector's process ------------------------------------------------------------------------------


@contextmanager
def collector(forward_to: str, folder: Path):
    """The address of a collector that hands all traces on to `forward_to`."""
    if not AGENT.exists():
        pytest.skip(f"{AGENT} is not there: `make tools` gets it")
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as free:
        port = free.server_port
    command = [str(AGENT), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}", "--otlp-grpc-endpoint", "127.0.0.1:0",
               "--exporter", "otlp", "--otlp-exporter-endpoint", forward_to, "--otlp-exporter-protocol", "http",
               "--batch-timeout", "200ms",
               "--pid-file", str(folder / "pid"), "--log-file", str(folder / "log")]  # fmt: skip
    process = subprocess.Popen(command, stdout=(folder / "out").open("w"), stderr=subprocess.STDOUT)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30)
            except urllib.error.HTTPError:
                break
            except OSError:
                assert process.poll() is None, (folder / "out").read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)


def received(requests: list[ExportTraceServiceRequest], spans: int) -> list[tuple[str, bytes]]:
    for _ in range(1_200):
        found = sorted(one for request in list(requests) for one in sorted_spans(request))
        if len(found) >= spans:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{len(found)} spans of {spans} came")


@pytest.mark.traces
def test_a_collector_hands_on_all_that_is_exported(tmp_path, monkeypatch):
    with receiver() as (address, requests), collector(address, tmp_path) as agent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", agent)
        seen = InMemorySpanExporter()
        services = Telemetry("tailrace-coordinator", otlp=True), Telemetry("tailrace-engine", otlp=True)
        for telemetry in services:
            telemetry._provider.add_span_processor(SimpleSpanProcessor(seen))
        traced(False, *services)
        for telemetry in services:
            telemetry.close()
        assert received(requests, 11) == sorted_spans(encode_spans(seen.get_finished_spans()))


@pytest.mark.traces
def test_a_collector_takes_the_file_of_a_run(tmp_path, spans):
    with receiver() as (address, requests), collector(address, tmp_path) as agent:
        data = json.dumps(traces_data(spans)).encode()
        sent = urllib.request.Request(f"{agent}/v1/traces", data, {"content-type": "application/json"})
        assert urllib.request.urlopen(sent, timeout=120).status == 200
        assert received(requests, 11) == sorted_spans(as_message(traces_data(spans)))


@pytest.mark.parametrize("keep", [True, False])
def test_a_coordinator_keeps_the_trace_of_another_process_s_driver_if_the_batch_asks_for_it(keep):
    driver, coordinator = Telemetry("driver"), Telemetry("tailrace-coordinator")
    header = traceparent(driver.span("driver", keep=True))
    spans = BatchSpans(coordinator, BatchSettings(batch_id="b", traceparent=header, keep_trace=keep), "demo")
    spans.close()
    assert bool(coordinator.take(header)) == keep
