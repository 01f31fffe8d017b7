"""The engine's end of a line: runs the chunks that arrive, and sends their ends and a report every interval.

Invariant: each chunk gives one end, unless the line is closed first, which aborts it. A line ends when the coordinator
opens another one, or has been silent for SILENT_S. Owned by the engine replica, on its event loop.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from tailrace.deployments.channel import frames
from tailrace.deployments.channel.numbered import NumberedEnd
from tailrace.deployments.channel.sockets import EngineSocket
from tailrace.deployments.messages.chunk import ChunkRequest, ChunkResult, EngineStats
from tailrace.deployments.messages.errors import EngineDown, RequestRefused, one_line

SILENT_S = 120.0
"""Maximum seconds without a pulse: Ray declares a host that is cut off dead after 73 s; until then a line may heal."""

IDLE_SILENT_S = 3.0
"""The same after the first pulse and while no chunk runs, or three report intervals if that is longer: nothing is lost
then, and the coordinator may have ended with the service. Serve stops a replica once this line has ended.
"""

REPORT_S = 0.5
"""Seconds between reports before the first pulse."""


class ChunkEngine(Protocol):
    """The methods of an engine replica that a line calls."""

    async def generate_chunk(self, chunk: ChunkRequest) -> ChunkResult: ...

    async def abort(self, chunk_id: str, keep_kv: bool) -> None: ...

    async def stats(self) -> EngineStats: ...


class EngineLine:
    """`session`: the line's name, given by the coordinator. `dial`: opens the socket, given what takes its frames."""

    def __init__(self, session: str, engine: ChunkEngine, dial: Callable[[Callable[[bytes], None]], EngineSocket]):
        self.session = session
        self._engine, self._now = engine, asyncio.get_running_loop().time
        self._report_s = REPORT_S
        self._chunks: dict[str, asyncio.Task] = {}
        self._others: set[asyncio.Task] = set()
        self._due, self._heard_s, self.closed = asyncio.Event(), self._now(), False
        self.was_pulsed = False
        self._holder = 0
        self._socket = dial(self._take)
        self._end = NumberedEnd(frames.encode, frames.decode, self._socket.send)

    async def hold(self) -> None:
        """Sends reports until the line ends, or until another call holds it."""
        self._holder = holder = self._holder + 1
        try:
            while self._holder == holder and not self.closed and not self._is_left():
                self._due.clear()
                with contextlib.suppress(Exception):  # an engine that is down reports nothing
                    self._end.send_once(frames.Report(self._now(), await self._engine.stats()))
                self._end.resend(self._now())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._report_s):
                        await self._due.wait()
        finally:
            if self._holder == holder:
                self.close()

    def _is_left(self) -> bool:
        idle_s = max(IDLE_SILENT_S, 3 * self._report_s)  # reports are rare in a large fleet, whose coordinator is busy
        is_idle = self.was_pulsed and not self._chunks  # 2,000 lines take seconds to open
        return self._now() > self._heard_s + (idle_s if is_idle else SILENT_S)

    def report(self) -> None:
        """Sends a report at once: something has changed that the coordinator waits for."""
        self._due.set()

    def close(self) -> None:
        """Closes the line, and aborts the chunks that run for it."""
        if not self.closed:
            self.closed = True
            self._due.set()
            self._socket.close()
            for task in self._chunks.values():
                task.cancel()

    def _take(self, frame: bytes) -> None:
        if self.closed:
            return
        try:
            message = self._end.take(frame, self._now())
        except ValueError:  # a message of another release
            return
        self._heard_s = self._now()
        match message:
            case frames.Start(chunk):
                task = self._chunks[chunk.chunk_id] = asyncio.ensure_future(self._run(chunk))
                task.add_done_callback(lambda _: self._chunks.pop(chunk.chunk_id, None))
            case frames.Abort(chunk_id, keep_kv):
                task = asyncio.ensure_future(self._engine.abort(chunk_id, keep_kv))
                self._others.add(task)
                task.add_done_callback(self._others.discard)
            case frames.Pulse(report_s):
                self._report_s, self.was_pulsed = report_s, True

    async def _run(self, chunk: ChunkRequest) -> None:
        """Runs a chunk, and sends its end."""
        cause = frames.Cause.CHUNK
        try:
            self._send(frames.ChunkEnded(chunk.chunk_id, await self._engine.generate_chunk(chunk)))
            return
        except asyncio.CancelledError as error:  # an error of the engine, unless the line was closed
            if self.closed:
                raise
            reason: BaseException = error
        except EngineDown as error:
            cause, reason = frames.Cause.DOWN, error
        except RequestRefused as error:
            cause, reason = frames.Cause.REFUSED, error
        except Exception as error:  # noqa: BLE001 - the edge of a chunk: its caller gets the reason
            reason = error
        self._send(frames.ChunkFailure(chunk.chunk_id, cause, one_line(reason)))

    def _send(self, message: frames.Message) -> None:
        if not self.closed:
            self._end.send(message, self._now())
