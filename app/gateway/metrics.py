"""Figures of one gateway replica for Prometheus, `GET /metrics`: requests, refusals, open requests, seconds.

Invariant: labels are routes of the application, statuses and a few reasons, so that no caller can make series. Each
replica counts for itself, under a name of its own. The outermost ASGI middleware, so that refusals at the doors count.
"""

import time
from collections.abc import Awaitable, Callable
from secrets import token_hex

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""From a status to a long answer of an agent."""

NO_ROUTE = "none"
"""Label of a request that has come to no route."""

REASONS = {401: "token", 403: "role", 413: "body", 429: "quota", 503: "away"}
"""By status, of requests that a route or a door has refused; others of 400 to 499 are refused for their content."""


def reason_of(status: int, route: str) -> str | None:
    """Why a request was refused, or None if it was not."""
    if route == NO_ROUTE and status in (404, 405, 429):
        return "max_open" if status == 429 else "route"
    return REASONS.get(status, "content" if 400 <= status < 499 else None)


class GatewayMetrics:
    """The figures of one process. `replica`: their label."""

    def __init__(self) -> None:
        self.registry, self.replica = CollectorRegistry(), token_hex(4)
        self._requests = Counter(
            "tailrace_gateway_requests",
            "Answered requests; status 0: the client had left",
            ("replica", "route", "status"),
            registry=self.registry,
        )
        self._refused = Counter(
            "tailrace_gateway_refused", "Refused requests, by reason", ("replica", "reason"), registry=self.registry
        )
        self._seconds = Histogram(
            "tailrace_gateway_request_seconds",
            "From a request to the end of its answer",
            ("replica", "route"),
            buckets=SECONDS,
            registry=self.registry,
        )
        opened = Gauge("tailrace_gateway_open_requests", "Requests in progress", ("replica",), registry=self.registry)
        self._open = opened.labels(self.replica)

    def begin(self) -> None:
        self._open.inc()

    def end(self, route: str, status: int, seconds: float) -> None:
        self._open.dec()
        self._requests.labels(self.replica, route, str(status)).inc()
        self._seconds.labels(self.replica, route).observe(seconds)
        if (reason := reason_of(status, route)) is not None:
            self._refused.labels(self.replica, reason).inc()


class Metered:
    """ASGI middleware that counts each request of HTTP."""

    def __init__(self, app: Callable[..., Awaitable[None]], metrics: GatewayMetrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = time.monotonic(), 0

        async def seen(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.begin()
        try:
            await self._app(scope, receive, seen)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._metrics.end(route, status, time.monotonic() - began_s)


def add_metrics(app: FastAPI) -> None:
    """The route, and the middleware; to be added last, so that it sees all others' refusals."""
    metrics = GatewayMetrics()
    app.add_middleware(Metered, metrics=metrics)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Figures of this replica, in Prometheus's text format."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)
