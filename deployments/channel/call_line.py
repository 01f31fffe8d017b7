"""A gateway's end of its line to the coordinator: sends calls, and receives their answers.

Invariant: a call ends in its answers, in CallFailed, or in ConnectionError once the line is closed; a caller that
leaves cancels its call. Owned by the gateway's connection, on its event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any

from tailrace.deployments.channel import call_frames as frames
from tailrace.deployments.channel.call_lines import BEAT_S
from tailrace.deployments.channel.numbered import NumberedEnd
from tailrace.deployments.channel.sockets import EngineSocket

DOUBT_S = 3 * BEAT_S
"""Seconds without a frame after which Ray is asked whether the coordinator lives."""


class CallFailed(RuntimeError):
    """Raised for a call that has raised at the coordinator; one line."""


class CallLine:
    """`role`: of the calls. `dial`: opens the socket, given what takes its frames. `lives`: asks Ray whether the
    coordinator still has this line.
    """

    def __init__(
        self, role: str, dial: Callable[[Callable[[bytes], None]], EngineSocket], lives: Callable[[], Awaitable[bool]]
    ):
        self._role, self._lives, self._now = role, lives, asyncio.get_running_loop().time
        self._heard_s = self._now()
        self._numbers, self._calls = count(1), {}  # by number: the queue of a call's answers
        self.is_open = True  # for further calls
        self._socket = dial(self._take)
        self._end = NumberedEnd(frames.encode, frames.decode, self._socket.send)
        self._following = asyncio.ensure_future(self._follow())

    async def ask(self, method: str, arguments: Sequence) -> Any:
        """Returns the answer of a call."""
        number, answers = self._begin(method, arguments)
        try:
            return frames.given((await _next(answers)).value)
        except asyncio.CancelledError:
            self._send(frames.Left(number))
            raise
        finally:
            del self._calls[number]

    async def stream(self, method: str, arguments: Sequence) -> AsyncIterator:
        """Yields the answers of a call. Closing the iterator before its end cancels the call."""
        number, answers = self._begin(method, arguments)
        try:
            while (item := await _next(answers)) is not None:
                yield frames.given(item.value)
        except (asyncio.CancelledError, GeneratorExit):
            self._send(frames.Left(number))
            raise
        finally:
            del self._calls[number]

    def close(self) -> None:
        """Ends all calls by ConnectionError."""
        self.is_open = False
        self._following.cancel()
        self._socket.close()
        for answers in self._calls.values():
            answers.put_nowait(ConnectionError("the line to the coordinator has broken off"))

    def _begin(self, method: str, arguments: Sequence) -> tuple[int, asyncio.Queue]:
        number = next(self._numbers)
        self._send(frames.Call(number, method, self._role, frames.named(tuple(arguments))))
        answers = self._calls[number] = asyncio.Queue()
        return number, answers

    async def _follow(self) -> None:
        """Sends beats until the other end has lost this line, or another one is used and no call is left here."""
        while self.is_open or self._calls:
            await asyncio.sleep(BEAT_S)
            now_s = self._now()
            self._end.resend(now_s)
            self._end.send_once(frames.Beat())
            if now_s > self._heard_s + DOUBT_S and not await self._lives():
                break
        self.close()

    def _take(self, frame: bytes) -> None:
        try:
            message = self._end.take(frame, self._now())
        except ValueError:  # a message of another release
            return
        self._heard_s = self._now()
        match message:
            case frames.Item(number) if number in self._calls:
                self._calls[number].put_nowait(message)
            case frames.CallEnded(number, error, again) if number in self._calls:
                self.is_open = self.is_open and not again
                self._calls[number].put_nowait((ConnectionError if again else CallFailed)(error) if error else None)

    def _send(self, message: frames.Message) -> None:
        self._end.send(message, self._now())


async def _next(answers: asyncio.Queue) -> frames.Item | None:
    """Returns the next answer of a call, None after the last one. Raises the error of a call that has failed."""
    item = await answers.get()
    if isinstance(item, Exception):
        raise item
    return item
