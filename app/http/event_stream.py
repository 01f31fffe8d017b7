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
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    await body(self.framed(event))
            except Exception as error:  # noqa: BLE001 - the status is sent: any error becomes an event
                await body(self.framed(self._error_event(error)))
        await body(self.last, more=False)

    last = "data: [DONE]\n\n"

    @staticmethod
    def framed(event: dict | str) -> str:
        """Returns the lines of an event."""
        return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"


class NamedEventStream(EventStream):
    """Events of a dialect that names them, by their field `type`; the last one says that it is the last. An event may
    be its lines.
    """

    last = ""

    @staticmethod
    def framed(event: dict | str) -> str:
        return event if isinstance(event, str) else f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def left(receive) -> None:
    """Returns once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
