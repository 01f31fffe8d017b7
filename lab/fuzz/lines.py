"""Simulated lines between coordinators and engine replicas: frames that take time, and connections that break.

As over TCP, frames arrive in order. A partition, or a silent event loop, delays them; a break loses the frames on the
way.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

from tailrace.deployments.channel.encrypted import Address
from tailrace.deployments.channel.engine_line import EngineLine
from tailrace.lab.fuzz.replica import SimulatedReplica
from tailrace.lab.fuzz.virtual_time import Process

LATENCY_S = 0.05


class Way:
    """One direction of a connection to `replica`."""

    def __init__(self, replica: SimulatedReplica, rng: Random, deliver: Callable[[bytes], None]):
        self._replica, self._rng, self._deliver = replica, rng, deliver
        self._last_s, self._breaks = 0.0, 0
        self._frames: deque[tuple[bytes, int]] = deque()  # on the way, each with the breaks before it
        self._loop = asyncio.get_running_loop()

    def send(self, frame: bytes) -> None:
        self._last_s = max(self._last_s, self._loop.time() + LATENCY_S * self._rng.random())
        self._frames.append((frame, self._breaks))
        self._loop.call_at(self._last_s, self._arrive)

    def cut(self) -> None:
        """Loses the frames on the way."""
        self._breaks += 1

    def _arrive(self) -> None:
        """Delivers the first frame, which is due. A loop may call the arrivals of one instant in any order."""
        held_s = max(self._replica.parted_until_s, self._replica.silent_until_s)
        if held_s > self._loop.time():
            self._last_s = max(self._last_s, held_s)
            self._loop.call_at(held_s, self._arrive)
            return
        frame, breaks = self._frames.popleft()
        if breaks == self._breaks:
            self._deliver(frame)


class SimulatedListener:
    """The socket of a coordinator."""

    def __init__(self, process: Process, number: int, take: Callable[[str, bytes], None]):
        self.address = Address(f"sim://{number}", b"")
        self._process, self._take = process, take
        self.ways: dict[str, Way] = {}  # to engines, by session

    def hear(self, session: str, frame: bytes) -> None:
        if self._process.alive:
            self._process.run(self._take, session, frame)

    def send(self, session: str, frame: bytes) -> None:
        if session in self.ways:
            self.ways[session].send(frame)

    def read(self) -> None:
        """Does nothing: no frame waits here."""

    def close(self) -> None:
        self.ways.clear()


class SimulatedDialled:
    """The socket of an engine."""

    def __init__(self, replica: SimulatedReplica, rng: Random, at: SimulatedListener, session: str, take: Callable):
        self._listener, self._session = at, session
        self._to_coordinator = Way(replica, rng, partial(at.hear, session))
        self._to_engine = at.ways[session] = Way(replica, rng, partial(_hear, replica, take))
        replica.ways = [self._to_coordinator, self._to_engine]

    def send(self, frame: bytes) -> None:
        self._to_coordinator.send(frame)

    def close(self) -> None:
        self._listener.ways.pop(self._session, None)


def _hear(replica: SimulatedReplica, take: Callable[[bytes], None], frame: bytes) -> None:
    if replica.alive:
        replica.run(take, frame)


class SimulatedLines:
    """All lines of a cluster."""

    def __init__(self, rng: Random):
        self._rng = rng
        self._listeners: dict[str, SimulatedListener] = {}

    def listen(self, process: Process, take: Callable[[str, bytes], None]) -> SimulatedListener:
        listener = SimulatedListener(process, len(self._listeners), take)
        self._listeners[listener.address.endpoint] = listener
        return listener

    def dial(self, replica: SimulatedReplica, address: Address, session: str) -> EngineLine:
        listener = self._listeners[address.endpoint]
        rng = Random(self._rng.random())
        return EngineLine(session, replica.shell, partial(SimulatedDialled, replica, rng, listener, session))
