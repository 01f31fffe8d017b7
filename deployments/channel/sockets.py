"""The two ends of a line on an asyncio loop: one socket of the coordinator for all engines, and one of each engine.

A frame is sent at once, or dropped if the other end is absent or does not read. `NumberedEnd` then sends it again.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

import zmq

from tailrace.deployments.channel.encrypted import Address, dial, listen

MAX_FRAME_BYTES = 1 << 30
"""Maximum size of a frame, above any chunk's end: a peer that announces more is disconnected."""

MAX_QUEUED = 10_000
"""Maximum number of frames that wait in a socket each way: gateways ask for some thousand samples at once, and a frame
that is dropped arrives 3 s later.
"""


class EngineSocket(Protocol):
    """An engine's end."""

    def send(self, frame: bytes) -> None: ...

    def close(self) -> None: ...


class CoordinatorSocket(Protocol):
    """The coordinator's end. `address`: address that engines dial."""

    address: Address

    def send(self, session: str, frame: bytes) -> None: ...

    def read(self) -> None:
        """Takes the frames that have arrived, at once."""

    def close(self) -> None: ...


class _LoopSocket:
    """A socket whose messages go to `take` on the running loop. ZeroMQ signals new messages by the socket's file only
    once, so the socket is read until it is empty, and checked after each send.
    """

    def __init__(self, kind: int, take: Callable[[list[bytes]], None]):
        self._loop, self._take = asyncio.get_running_loop(), take
        self._socket = zmq.Context.instance().socket(kind)
        self._socket.maxmsgsize = MAX_FRAME_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = MAX_QUEUED
        self._looks = False

    def _begin(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self.read)
        self._look()

    def read(self) -> None:
        self._looks = False
        while not self._socket.closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._take(self._socket.recv_multipart(zmq.NOBLOCK))

    def _look(self) -> None:
        if not self._looks:
            self._looks = True
            self._loop.call_soon(self.read)

    def _send(self, parts: list[bytes]) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer is absent, or its queue is full
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        self._look()

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close(linger=0)


class ListeningSocket(_LoopSocket):
    """The coordinator's socket. `take`: called with session and frame of a message. `host`: an address of this node."""

    def __init__(self, host: str, take: Callable[[str, bytes], None]):
        super().__init__(zmq.ROUTER, self._taken)
        self._take_frame = take
        self._socket.router_mandatory = self._socket.router_handover = 1
        self.address = listen(self._socket, host)
        self._begin()

    def _taken(self, parts: list[bytes]) -> None:
        if len(parts) == 2:
            self._take_frame(parts[0].decode(errors="replace"), parts[1])

    def send(self, session: str, frame: bytes) -> None:
        self._send([session.encode(), frame])


class DialledSocket(_LoopSocket):
    """An engine's socket, connected to a coordinator."""

    def __init__(self, address: Address, session: str, take: Callable[[bytes], None]):
        super().__init__(zmq.DEALER, lambda parts: take(parts[0]))
        self._socket.identity = session.encode()
        dial(self._socket, address)
        self._begin()

    def send(self, frame: bytes) -> None:
        self._send([frame])
