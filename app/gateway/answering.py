"""The answer of a route that generates: whole, or by events. A client that leaves first ends its samples."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tailrace.app.gateway import answers
from tailrace.app.gateway.edge.errors import SampleFailed, error_body, error_of
from tailrace.app.gateway.naming import Naming
from tailrace.app.gateway.service import GatewayService, Wanted
from tailrace.app.gateway.stream_answers import AnswerStream
from tailrace.app.http.event_stream import EventStream, left
from tailrace.deployments.messages.session import SampleAnswer

Ended = Callable[[SampleAnswer], Awaitable[None]]


async def _nothing(_: SampleAnswer) -> None:
    """Does nothing at an answer's end."""


async def made(
    service: GatewayService,
    http: Request,
    wanted: Wanted,
    naming: Naming,
    body: Callable[[list[list[SampleAnswer]]], dict],
    ended: Ended = _nothing,
    form: Callable[[dict], Any] = dict,
) -> Response:
    """Generates, and answers by `body` and `form`, unless the client has left. `ended`: awaited for the first sample,
    between these two. Raises SampleFailed.
    """
    found = await _unless_gone(http, service.generate(http.scope["role"], wanted, naming))
    if found is None:
        return JSONResponse(error_body(499, "the client has left"), 499)
    if failed := answers.failures(found):
        raise SampleFailed(failed[0])
    content = body(found)
    await ended(found[0][0])
    return JSONResponse(form(content))  # FastAPI would walk over every token of a dict


async def streamed(
    service: GatewayService,
    http: Request,
    stream: AnswerStream,
    ended: Ended = _nothing,
    form: Callable[[AsyncIterator[dict]], Response] | None = None,
) -> Response:
    """Answers by events. A refusal comes before the first one, with its own status. `ended`: as in `made`, for each
    sample. `form`: makes the answer of the events, by default OpenAI's.
    """
    parts = service.stream(http.scope["role"], stream.wanted, stream.naming)
    first = await _unless_gone(http, anext(parts))
    if first is None:
        await parts.aclose()
        return JSONResponse(error_body(499, "the client has left"), 499)

    async def events():
        async with aclosing(parts):
            number, part = first
            while True:
                due = list(stream.events(number, part))
                if part.answer is not None:
                    await ended(part.answer)
                for event in due:
                    yield event
                if (following := await anext(parts, None)) is None:
                    break
                number, part = following
            for event in stream.last():
                yield event

    return form(events()) if form is not None else EventStream(events(), lambda error: error_of(error)[0])


async def _unless_gone(http: Request, work: Awaitable):
    """Returns the work's result; None if the client leaves first, which cancels the work."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(left(http.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)  # a generator can be closed once its step has ended
