"""One drafter: a socket for engines, and the thread that steps the draft model for them.

The socket is bound to one address of this node, at a free port, and encrypted (CurveZMQ, RFC 26): peers without its
key, which travels inside the cluster, are ignored. Invariant: malformed messages affect only their sender; a failed
step ends the thread and leaves `healthy` False. Owned by the Drafter replica and by tests; `stats` and `stop` are safe
from any thread.
"""

import threading
import time
from collections import Counter
from concurrent.futures import Future

import zmq

from tailrace.deployments.channel.encrypted import Address, listen
from tailrace.deployments.drafter.sessions import Sessions
from tailrace.deployments.drafter.wire import Confirm, Guess, Message, Open, Stepped, Stop, Unknown, decode, encode
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

IDLE_MS = 50
"""Maximum milliseconds to wait for a message while no sample can be drafted for."""

IDLE_S = 60.0
"""Seconds without a message from its engine after which a sample is forgotten; an engine that still runs it reopens
it.
"""


class DrafterServer:
    """`host`: the address to bind to. The constructor returns once the model can draft; vLLM's errors pass through
    it.
    """

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
        """Returns `Sessions.counts`, refused messages, and `step_cost`, as of the last loop."""
        return dict(self._stats)

    def stop(self) -> None:
        """Ends the thread after the step in progress. Engines are not notified: their guesses stop."""
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
                outbox: dict[bytes, list[Message]] = {}
                for peer, guess in sessions.step():
                    outbox.setdefault(peer, []).append(guess)
                stepped = [] if sessions.stepped is None else [sessions.stepped]
                for peer, guesses in outbox.items():
                    say(socket, peer, [*stepped, *guesses])
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
                if isinstance(message, Confirm):  # for a forgotten sample, or after a lost message
                    say(socket, peer, [Unknown(message.name)])
                else:  # this sample continues without drafts
                    self._counts["refused"] += 1

    def _obey(self, peer: bytes, message: Message, sessions: Sessions) -> None:
        match message:
            case Open():
                sessions.open(peer, message)
            case Confirm():
                sessions.confirm(peer, message)
            case Stop(name):
                sessions.stop(peer, name)
            case Guess() | Unknown() | Stepped():
                raise ValueError(f"{type(message).__name__} is sent by drafters, not to them")


def say(socket: zmq.Socket, peer: bytes, messages: list[Message]) -> None:
    """Sends to one engine; messages are dropped if it has left or does not read."""
    socket.send_multipart([peer, encode(messages)])
