"""The board's routes: the page, its stream of deltas as server-sent events, one sample. They are read-only.

`/board` of a gateway, which requires its tokens; and `tailrace board`, on loopback. Without tokens a name other than
loopback's in the Host header is refused, so that no page of another site reads them by a name that it points here.
"""

from collections.abc import Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from tailrace.app.board.page import page
from tailrace.app.board.recording import Recording
from tailrace.app.board.watcher import Watcher
from tailrace.app.calls.client import RolloutClient
from tailrace.app.http.event_stream import EventStream
from tailrace.deployments.messages.errors import one_line

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
FRESH = {"Cache-Control": "no-store"}


def add_board(
    app: FastAPI, watcher: Watcher, reader: Callable[[Request], RolloutClient], any_host: bool, path: str = "/board"
) -> None:
    """Adds the routes. `reader`: returns the client of a request's caller, whose role decides whether texts are shown.
    `path`: path of the page.
    """

    @app.get(path, include_in_schema=False)
    async def whole_page(http: Request):
        return _refused(http, any_host) or HTMLResponse(page(), headers=FRESH)

    @app.get("/board/stream")
    async def stream(http: Request):
        """The service as rows, then the rows that change: server-sent events, see `RolloutClient.watch`."""
        return _refused(http, any_host) or EventStream(watcher.follow(), lambda error: {"error": one_line(error)})

    @app.get("/board/sample", responses={204: {"description": "no sample of this id is in flight"}})
    async def sample(id: str, http: Request):
        """Chunks, moves, reasons and faults of a sample; its text too if the caller's role may roll out."""
        if (refused := _refused(http, any_host)) is not None:
            return refused
        client = reader(http)
        log = await client.sample_log(id)
        if log is None:
            return Response(status_code=204)
        return JSONResponse(log.model_dump() | await _text(client, log.sample_id), headers=FRESH)


async def _text(client: RolloutClient, sample_id: str) -> dict:
    try:
        detail = await client.sample_detail(sample_id)
    except PermissionError as error:
        return {"text": None, "text_refused": str(error)}
    return {"text": None} if detail is None else detail.model_dump(include=TEXT)


TEXT = {"text", "text_tokens", "segments", "cached_tokens", "computed_tokens", "drafted_tokens", "accepted_tokens"}


def _refused(http: Request, any_host: bool) -> Response | None:
    host = http.headers.get("host", "").rpartition(":")[0] or http.headers.get("host", "")
    if any_host or host in LOOPBACK or http.headers.get("host", "") in LOOPBACK:
        return None
    return Response("give an address of loopback", 400)


def make_board(client: RolloutClient) -> FastAPI:
    """Returns the board of a running service, for loopback alone. `client`: an evaluator's."""
    watcher = Watcher(lambda: client, always=True)

    @asynccontextmanager
    async def watching(app: FastAPI):
        watcher.begin()
        yield
        watcher.end()

    app = FastAPI(title="Tailrace board", lifespan=watching, docs_url=None, redoc_url=None, openapi_url=None)
    add_board(app, watcher, lambda http: client, any_host=False, path="/")
    return app


def make_playback(recording: Recording) -> FastAPI:
    """Returns the same page over a recorded run, for loopback alone."""
    app = FastAPI(title="Tailrace board", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def whole_page(http: Request):
        return _refused(http, False) or HTMLResponse(page(recorded=True), headers=FRESH)

    @app.get("/board/recording")
    async def whole_recording(http: Request):
        return _refused(http, False) or JSONResponse(recording.as_json(), headers=FRESH)

    @app.get("/board/sample")
    async def sample(id: str, http: Request):
        found = recording.samples.get(id)
        return _refused(http, False) or (Response(status_code=204) if found is None else JSONResponse(found))

    return app
