"""Figures of one gateway replica: requests, refusals, open requests, seconds; `GET /metrics` shows them.

Invariant: labels are routes of the application, statuses and a few reasons, so that no caller can create series. Each
replica counts for itself, under its own name. The outermost ASGI middleware, so that refusals of the access control
count.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from secrets import token_hex

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from tailrace.deployments.metrics.export import export_of
from tailrace.deployments.metrics.metric import Distribution
from tailrace.deployments.metrics.registry import HTTP_OPEN, HTTP_REFUSED, HTTP_REQUESTS, HTTP_SECONDS

NO_ROUTE = "none"
"""Label of a request that has reached no route."""

REASONS = {401: "token", 403: "role", 405: "route", 413: "body", 429: "quota", 503: "away"}
"""Reasons by status, of requests that a route or the access control has refused; others of 400 to 499 are refused for
their content.
"""


def reason_of(status: int, route: str) -> str | None:
    """Returns why a request was refused, or None if it was not."""
    if route == NO_ROUTE and status in (404, 429):
        return "max_open" if status == 429 else "route"
    return REASONS.get(status, "content" if 400 <= status < 499 else None)


class GatewayMetrics(Collector):
    """The figures of one process. `replica`: label of its figures on the page."""

    def __init__(self) -> None:
        self.replica = token_hex(4)
        self._open = 0
        self._requests: Counter[tuple[str, str]] = Counter()
        self._refused = Counter({(reason,): 0 for reason in HTTP_REFUSED.labels["reason"]})
        self._seconds: dict[tuple[str], Distribution] = {}

    def begin(self) -> None:
        self._open += 1

    def end(self, route: str, status: int, seconds: float) -> None:
        self._open -= 1
        self._requests[route, str(status)] += 1
        self._seconds.setdefault((route,), Distribution(HTTP_SECONDS.bounds)).add(seconds)
        if (reason := reason_of(status, route)) is not None:
            self._refused[reason,] += 1

    def families(self, **constant: str) -> Iterator[Family]:
        """Yields the figures. `constant`: further labels of every series, with their values."""
        yield HTTP_REQUESTS.family(self._requests, constant)
        yield HTTP_REFUSED.family(self._refused, constant)
        yield HTTP_SECONDS.family(self._seconds, constant)
        yield HTTP_OPEN.family({(): self._open}, constant)

    def collect(self) -> Iterator[Family]:
        """Yields the figures of the page."""
        return self.families(replica=self.replica)

    def page(self) -> bytes:
        return generate_latest(self)


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
        except Exception:  # whatever it is, its answer is made outside
            status = status or 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._metrics.end(route, status, time.monotonic() - began_s)


def add_metrics(app: FastAPI) -> None:
    """Adds the route and the middleware; call it last, so that it sees all others' refusals."""
    metrics = app.state.metrics = GatewayMetrics()
    app.add_middleware(Metered, metrics=metrics)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Return figures of this replica, in Prometheus's text format."""
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)


def exporting(otlp: bool) -> Callable:
    """Returns the lifespan of an application that exports its figures to Ray's endpoint, and to a collector if
    `otlp`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        export = export_of("gateway", otlp, app.state.metrics.families)
        task = asyncio.get_running_loop().create_task(export.run())
        yield
        task.cancel()

    return lifespan
