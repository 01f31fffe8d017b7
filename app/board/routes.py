"""The board's routes: the page, its stream of looks as server-sent events, one sample. For loopback alone.

Nothing can be changed through them. A name other than loopback's in the Host header is refused, so that no page of
another site reads them by a name that it points here.
"""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, Response
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, StreamingResponse

from tailrace.app.board.page import page
from tailrace.app.board.watcher import Watcher
from tailrace.app.calls.client import RolloutClient

LOOPBACK = ["127.0.0.1", "localhost", "[::1]"]


def make_board(client: RolloutClient, every_s: float) -> FastAPI:
    """`client`: of an evaluator. `every_s`: seconds between two looks."""
    watcher = Watcher(client, every_s)

    @asynccontextmanager
    async def watching(app: FastAPI):
        task = asyncio.ensure_future(watcher.run())
        yield
        task.cancel()

    app = FastAPI(title="Tailrace board", lifespan=watching, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)

    @app.get("/")
    async def whole_page():
        return HTMLResponse(page(), headers={"Cache-Control": "no-store"})

    @app.get("/looks")
    async def looks():
        async def events():
            async with aclosing(watcher.looks()) as found:
                async for look in found:
                    yield f"data: {json.dumps(look)}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.get("/sample")
    async def sample(id: str):
        found = await client.sample_detail(id)
        return Response(status_code=204) if found is None else found.model_dump()

    return app
