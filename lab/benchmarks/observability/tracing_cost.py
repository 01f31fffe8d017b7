"""Processor seconds of tracing in this process, call by call, while it does its work; and a collector to export to.

`TracingCost` times every function that exists for tracing alone. A call counts if it has a span to work on: a call
without one is also made with tracing off. The thread that works and the thread that exports are timed by their own
processor time, so that other work of the machine does not count. Called by `tailrace bench observability`.
"""

import functools
import os
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import Span

from tailrace.deployments.batches import live_batch
from tailrace.deployments.batches.batch_spans import BatchSpans
from tailrace.deployments.telemetry import Telemetry

EXPORTED = (OTLPSpanExporter, "export")
WORKED = (
    (Telemetry, "span"),
    (Span, "end"),
    (BatchSpans, "open_chunk"),
    (BatchSpans, "end_chunk"),
    (live_batch, "traceparent"),
    (Span, "set_attributes"),
    (Span, "add_event"),
)

CALLS = 10_000
"""Number of calls of an empty function, by which the clock's own time is measured."""


class TracingCost:
    """Timer of the tracing functions. `worked_s`, `exported_s`: processor seconds so far. `spans`: number of spans that
    have ended so far.
    """

    def __init__(self):
        self.worked_s, self.exported_s, self.spans = 0.0, 0.0, 0
        self._inside, self._own_s = threading.local(), 0.0
        self._own_s = self._calibrated()
        for owner, name in WORKED:
            setattr(owner, name, self._timed(getattr(owner, name), "worked_s", name == "end"))
        setattr(EXPORTED[0], EXPORTED[1], self._timed(getattr(*EXPORTED), "exported_s", False))

    def _calibrated(self) -> float:
        """Returns the seconds that the clock itself adds to a call."""
        nothing = self._timed(lambda: None, "exported_s", False)
        for _ in range(CALLS):
            nothing()
        own_s, self.exported_s = self.exported_s / CALLS, 0.0
        return own_s

    def _timed(self, function, counter: str, is_end: bool):
        @functools.wraps(function)
        def call(*args, **named):
            if getattr(self._inside, "now", False):
                return function(*args, **named)
            self._inside.now, began_s, made = True, time.thread_time(), None
            try:
                made = function(*args, **named)
                return made
            finally:
                self._inside.now = False
                took_s = time.thread_time() - began_s - self._own_s
                if counter == "exported_s" or any(isinstance(one, Span) for one in (made, *args)):
                    setattr(self, counter, getattr(self, counter) + took_s)
                    self.spans += is_end

        return call


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def _serve(answer: Connection) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as server:
        answer.send(server.server_port)
        server.serve_forever()


@contextmanager
def collector():
    """Runs a process that accepts spans and drops them. Meanwhile OTEL_EXPORTER_OTLP_ENDPOINT has its address."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{here.recv()}"
    try:
        yield
    finally:
        del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
        process.terminate()
        process.join()
