"""One drafter: a socket that engines talk to, and the thread that steps the draft model for them.

The socket is bound to one address of this node, at a free port, and encrypted (CurveZMQ, RFC 26): who has not been
given its key, which travels inside the cluster, is not heard. Invariant: whoever sends nonsense harms nobody else; a
failed step ends the thread and leaves `healthy` False. Owned by the Drafter replica and by tests; `stats` and `stop`
are safe from any thread.
"""

import threading
import time
from collections import Counter
from concurrent.futures import Future
from typing import NamedTuple

import zmq

from tailrace.deployments.drafter.sessions import Sessions
from tailrace.deployments.drafter.wire import Confirm, Guess, Message, Open, Stop, Unknown, decode, encode
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

IDLE_MS = 50
"""Longest wait for a message when there is nothing to draft."""

IDLE_S = 60.0
"""A sample that its engine has not mentioned for so long is forgotten; an engine that still runs it opens it again."""


class Address(NamedTuple):
    """Where a drafter listens, and the public key of whoever listens there."""

    endpoint: str
    key: bytes


class DrafterServer:
    """`host`: the address to bind to. Construction returns when the model can draft, and raises what vLLM raises."""

    def __init__(self, config: EngineConfig, host: str, rank: int = 0):
        self._stopped, self._counts, self._stats = False, Counter(), {}
        started: Future[Address] = Future()
        self._thread = threading.Thread(target=self._main, args=(config, host, rank, started), daemon=True)
        self._thread.start()
        self.address = started.result()

    @property
    def healthy(self) -> bool:
        return self._thread.is_alive()

    def stats(self) -> dict:
        """What `Sessions.counts` counts, messages refused, and `step_cost`; of a moment ago."""
        return dict(self._stats)

    def stop(self) -> None:
        """Ends the thread after the step in progress; engines are not told, they see that nothing comes."""
        self._stopped = True
        self._thread.join()

    def _main(self, config: EngineConfig, host: str, rank: int, started: Future[Address]) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            try:
                sessions = Sessions.launched(config, rank)
                started.set_result(listen(socket, host))
            except Exception as error:  # noqa: BLE001 - the edge of the thread: the constructor raises it
                started.set_exception(error)
                return
            try:
                self._serve(socket, sessions)
            finally:
                sessions.close()

    def _serve(self, socket: zmq.Socket, sessions: Sessions) -> None:
        looked_s = time.monotonic()
        while not self._stopped:
            socket.poll(0 if sessions.busy else IDLE_MS)
            while socket.poll(0):
                self._hear(socket, sessions)
            if sessions.busy:
                told: dict[bytes, list[Message]] = {}
                for peer, guess in sessions.step():
                    told.setdefault(peer, []).append(guess)
                for peer, guesses in told.items():
                    say(socket, peer, guesses)
            if time.monotonic() - looked_s > IDLE_S / 10:
                sessions.forget(IDLE_S)
                looked_s = time.monotonic()
            self._stats = sessions.counts() | dict(self._counts) | {"step_cost": sessions.step_cost}

    def _hear(self, socket: zmq.Socket, sessions: Sessions) -> None:
        peer, *frames = socket.recv_multipart()
        try:
            messages = decode(b"".join(frames))
        except ValueError:
            self._counts["bad_frames"] += 1
            return
        for message in messages:
            try:
                self._obey(peer, message, sessions)
            except (KeyError, ValueError):
                if isinstance(message, Confirm):  # of a sample that is forgotten, or something was lost on the way
                    say(socket, peer, [Unknown(message.name)])
                else:  # one sample goes without drafts
                    self._counts["refused"] += 1

    def _obey(self, peer: bytes, message: Message, sessions: Sessions) -> None:
        match message:
            case Open():
                sessions.open(peer, message)
            case Confirm():
                sessions.confirm(peer, message)
            case Stop(name):
                sessions.stop(peer, name)
            case Guess() | Unknown():
                raise ValueError("said by drafters, not to them")


def listen(socket: zmq.Socket, host: str) -> Address:
    """Binds a ROUTER to a free port of `host`, encrypted."""
    public, secret = zmq.curve_keypair()
    socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public, secret
    socket.linger = 0
    host = f"[{host}]" if ":" in host else host
    socket.ipv6 = host.startswith("[")
    return Address(f"tcp://{host}:{socket.bind_to_random_port(f'tcp://{host}')}", public)


def say(socket: zmq.Socket, peer: bytes, messages: list[Message]) -> None:
    """To one engine; dropped when it is gone or does not listen."""
    socket.send_multipart([peer, encode(messages)])
