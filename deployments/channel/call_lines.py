"""The coordinator's ends of the lines from gateways: makes their calls, and sends the answers.

Invariant: a call that has arrived is answered, unless its caller leaves or its gateway is silent for SILENT_S, which
cancel it. Owned by the coordinator, on its event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from inspect import isasyncgen
from secrets import token_hex
from typing import Any

from tailrace.deployments.channel import call_frames as frames
from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.numbered import NumberedEnd
from tailrace.deployments.channel.sockets import CoordinatorSocket
from tailrace.deployments.messages.errors import one_line
from tailrace.deployments.messages.liveness import LEASE_S

BEAT_S = 0.5
"""Seconds between two beats, which also acknowledge what has arrived."""

SILENT_S = LEASE_S
"""Seconds without a frame after which a gateway is gone: as long as its sessions live without it."""


@dataclass(slots=True, eq=False)
class _CallLine:
    session: str
    heard_s: float
    end: NumberedEnd
    calls: dict[int, asyncio.Task] = field(default_factory=dict)


class CallLines:
    """`ingress`: its methods are called. `listen`: opens the socket, given the function that takes its frames."""

    def __init__(self, ingress: Any, listen: Callable[[Callable[[str, bytes], None]], CoordinatorSocket]):
        self._ingress, self._now = ingress, asyncio.get_running_loop().time
        self._lines: dict[str, _CallLine] = {}
        self._closing = False
        self._socket = listen(self._take)

    def open(self, session: str) -> tuple[Address, str]:
        """Returns the address, and the session if it is open, else a new one."""
        if session not in self._lines:
            session = f"gateway/{token_hex(8)}"
            end = NumberedEnd(frames.encode, frames.decode, partial(self._socket.send, session))
            self._lines[session] = _CallLine(session, self._now(), end)
        return self._socket.address, session

    async def run(self) -> None:
        """Sends beats, and unacknowledged messages again. Never returns."""
        while True:
            await asyncio.sleep(BEAT_S)
            now_s = self._now()
            for line in list(self._lines.values()):
                if now_s > line.heard_s + SILENT_S:
                    self._drop(line)
                    continue
                line.end.resend(now_s)
                line.end.send_once(frames.Beat())

    async def close(self) -> None:
        """Returns once all calls have ended. Calls that arrive meanwhile are for another coordinator."""
        self._closing = True
        while tasks := [task for line in self._lines.values() for task in line.calls.values()]:
            await asyncio.wait(tasks)

    def _drop(self, line: _CallLine) -> None:
        del self._lines[line.session]
        for task in line.calls.values():
            task.cancel()

    def _take(self, session: str, frame: bytes) -> None:
        if (line := self._lines.get(session)) is None:
            return
        try:
            message = line.end.take(frame, self._now())
        except ValueError:  # a message of another release
            return
        line.heard_s = self._now()
        match message:
            case frames.Call(number) if self._closing:
                self._send(line, frames.CallEnded(number, "the coordinator is being replaced", again=True))
            case frames.Call(number):
                task = line.calls[number] = asyncio.ensure_future(self._make(line, message))
                task.add_done_callback(lambda _: line.calls.pop(number, None))
            case frames.Left(number) if number in line.calls:
                line.calls[number].cancel()

    async def _make(self, line: _CallLine, call: frames.Call) -> None:
        """Makes a call, and sends its answers."""
        try:
            if call.method not in frames.CALLS:
                raise ValueError(f"{call.method} is not called over a line")
            answer = await getattr(self._ingress, call.method)(call.role, *frames.given(call.arguments))
            if isasyncgen(answer):
                await self._pass(line, call.number, answer)
            else:
                self._send(line, frames.Item(call.number, frames.named(answer)))
        except (Exception, asyncio.CancelledError) as error:  # the edge of a call: its caller gets the reason
            lost = line.session not in self._lines  # its gateway was silent: a call is made again over another line
            self._send(line, frames.CallEnded(call.number, one_line(error), again=lost))
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _pass(self, line: _CallLine, number: int, answers: AsyncIterator) -> None:
        async with aclosing(answers) as items:
            async for item in items:
                self._send(line, frames.Item(number, frames.named(item)))
        self._send(line, frames.CallEnded(number))

    def _send(self, line: _CallLine, message: frames.Message) -> None:
        line.end.send(message, self._now())
