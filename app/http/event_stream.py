"""Server-sent events as an HTTP answer: each event as a line of JSON, then `[DONE]`; an error midway is an event, too.

Invariant: a client that leaves closes the events, and that ends its samples. Used by the gateway and by the board.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

from fastapi import Response

HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class EventStream(Response):
    """`events`: an async generator of JSON values, or of their texts. `error_event`: makes the event of an exception.

    The next event is requested once the one before it has been sent, so none queue up for a slow client.
    """

    def __init__(self, events: AsyncIterator[dict | str], error_event: Callable[[Exception], dict]):
        super().__init__()
        self._events, self._error_event = events, error_event

    async def __call__(self, scope, receive, send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        if not sending.cancelled():
            sending.result()

    async def _send(self, send) -> None:
        async def body(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await body(event if isinstance(event, str) else json.dumps(event))
            except Exception as error:  # noqa: BLE001 - the status is sent: any error becomes an event
                await body(json.dumps(self._error_event(error)))
        await body("[DONE]", more=False)


async def left(receive) -> None:
    """Returns once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
