"""The engine's side of the draft models: the assignment of samples to drafters, and the guesses received.

Invariant: only received tokens are proposed. Only a coupled sample waits for its drafter, for a bounded time. A guess
counts only as far as it agrees with the sample's current tokens, so an overtaken guess is harmless. A sample has one
line to its drafter over all its chunks on this engine (`lines.py`); a line without any guess in time, or that its
drafter refuses, is given back. The line goes to the drafter that ranks first for the sample's name, hence to the same
one from every engine. If a drafter leaves, only its samples move. Owned by `EngineDrafts`, on the engine's thread;
`meet` is called from another.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import zmq

from tailrace.deployments.channel.encrypted import Address, dial
from tailrace.deployments.draft_index.proposal import Proposal
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.drafter.lines import Kept, Line, chunk_end, end_of
from tailrace.deployments.drafter.wire import Confirm, Guess, Message, Open, Stepped, Stop, Unknown, decode, encode
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Source
from tailrace.policies.models.performance_estimator import PerformanceEstimator
from tailrace.policies.protocol.actions import DraftMode
from tailrace.policies.protocol.draft_methods import DraftMethod
from tailrace.policies.protocol.performance import chance


class Drafters:
    """The drafters of one engine, none before the first `meet`. `clock` returns seconds."""

    def __init__(self, config: DrafterConfig, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock = config, clock
        self._zmq = zmq.Context()
        self._met: tuple[Address, ...] = ()  # set by the last `meet`
        self._sockets: dict[Address, zmq.Socket] = {}
        self._running: dict[str, Line] = {}  # by chunk id
        self._kept = Kept()
        self._named: dict[str, Line] = {}  # lines with a drafter, by the drafter's name for them
        self._outbox: dict[Address, list[Message]] = {}
        self._counts: Counter[str] = Counter()
        self.performance = PerformanceEstimator()  # shared with its engine, which sets it

    def meet(self, addresses: Sequence[Address]) -> None:
        """Sets the drafters that exist now, replacing the earlier ones. Safe from any thread."""
        self._met = tuple(sorted(set(addresses)))

    # ---- events from `EngineDrafts` ----------------------------------------------------------------

    def open(self, chunk: ChunkRequest, mode: DraftMode | None) -> None:
        """Registers a chunk that drafts. Without `mode` the configured one applies.

        Its drafter is notified before the step that computes the context here: it has to compute the context too,
        unless it did so in the sample's previous chunk.
        """
        mode = mode or self._config.draft_mode
        line = self._taken_up(chunk, mode)
        if line is None:
            line = Line(chunk, mode, chunk.token_ids.tolist())
            self._assign(line)
        self._running[chunk.chunk_id] = line
        self._send()

    def made(self, chunk_id: str, tokens: list[int]) -> None:
        """Appends new tokens of the chunk."""
        line = self._running[chunk_id]
        self._confirm(line, tokens)
        line.made(tokens, self._clock())
        if line.hopeless:
            self._give_back(line)

    def close(self, chunk_id: str, goes_on: bool = False) -> tuple[int, int]:
        """Ends a chunk. Returns its tested draft tokens, verified or overtaken, and the number of right ones.

        `goes_on`: the sample may have another chunk here.
        """
        line = self._running.pop(chunk_id)
        wanted = line.address is not None or line.given_back
        keeps = goes_on and wanted and len(line.tokens) < end_of(line.chunk)
        for given_up in self._kept.put(line, self._clock()) if keeps else [line]:
            self._leave(given_up)
        self._send()
        return line.take_judged()

    def tidy(self) -> None:
        """Closes kept lines that no chunk has resumed. Called now and then, also while nothing runs."""
        for line in self._kept.take_old(self._clock()):
            self._leave(line)
        self._send()

    # ---- once a step -------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Sends the events since the last exchange, and reads the received messages; once a step."""
        if self._met != tuple(self._sockets):
            self._reconnect()
        self._send()
        for address, socket in self._sockets.items():
            while (frame := _next(socket)) is not None:
                for message in self._read(frame):
                    self._hear(address, message)

    def waits(self, chunk_id: str) -> bool:
        """Returns whether the chunk should skip the next step: it is coupled, and its drafter's guess is still due."""
        line = self._running[chunk_id]
        if not line.mode.coupled or line.guess or line.silent or line.address is None:
            return False
        if len(line.tokens) >= chunk_end(line.chunk):
            return False
        waits = line.waits(self._clock())
        self._counts["model_late"] += not waits
        if line.hopeless:
            self._give_back(line)
        return waits

    def proposal(self, chunk_id: str) -> Proposal:
        """Returns the draft model's next tokens, up to one window, each with the estimated acceptance so far.

        Tokens after the window are for the next step, available while the drafter receives the outcome of this one.
        """
        line = self._running[chunk_id]
        guess = line.guess[: line.mode.window]
        right, count = (
            chance(line.right, line.tested, self.performance.acceptance.chance(DraftMethod.MODEL)),
            len(guess),
        )
        tokens, sources = np.array(guess, np.int32), np.full(count, Source.MODEL, np.uint8)
        return Proposal(tokens, np.full(count, right, np.float32), sources, 0)

    @property
    def reached(self) -> bool:
        """True if there is a drafter, as of the last exchange."""
        return bool(self._sockets)

    def counts(self) -> dict[str, int]:
        """Returns counters since the start, and current sizes.

        Since the start: lines opened, resumed by another chunk, joined by their drafter, and given back because it
        never joined or refuses (`model_opened`, `model_resumed`, `model_joined`, `model_given_back`); guesses
        received, overtaken guesses, waits given up (`model_guesses`, `model_overtaken`, `model_late`). Now: drafters;
        lines, and those of them not joined yet (`model_lines`, `model_unjoined`) or without a chunk (`model_kept`).
        """
        lines = self._named.values()
        now = {"drafters": len(self._sockets), "model_lines": len(lines), "model_kept": len(self._kept)}
        return dict(self._counts) | now | {"model_unjoined": sum(not line.joined for line in lines)}

    def stop(self) -> None:
        self._zmq.destroy(linger=0)

    # ------------------------------------------------------------------------------------------------

    def _taken_up(self, chunk: ChunkRequest, mode: DraftMode) -> Line | None:
        """Returns the line of the sample's last chunk here with the tokens since then, or None if there is none."""
        plan = chunk.draft
        line = self._kept.take((plan.group.group_id, plan.sample_index))
        if line is None:
            return None
        if not line.extends_to(chunk) or not mode.window:
            self._leave(line)
            return None
        self._counts["model_resumed"] += line.address is not None
        another = (mode, end_of(chunk)) != (line.mode, end_of(line.chunk))
        line.chunk, line.mode = chunk, mode
        if more := chunk.token_ids[len(line.tokens) :].tolist():
            self._confirm(line, more)
        line.follow(more, self._clock())
        if another and line.address is not None:
            self._outbox[line.address].append(self._wish(line))
        return line

    def _confirm(self, line: Line, tokens: list[int]) -> None:
        if line.address is not None:
            self._outbox[line.address].append(Confirm(line.name, len(line.tokens), list(tokens)))

    def _assign(self, line: Line) -> None:
        """Opens the line, with all its tokens, at the drafter that ranks first; at none if the window is 0."""
        self._named.pop(line.name, None)
        sample = "{}#{}".format(*line.sample)
        drafters = self._sockets if line.mode.window else ()
        line.address, line.guess = max(drafters, key=lambda a: rank(sample, a), default=None), []
        line.silent, line.reopened, line.since_s, line.patience_s = False, False, self._clock(), self._config.patience_s
        line.late, line.alone, line.joined, line.given_back, line.reported = 0, 0, False, False, (0, 0)
        if line.address is None:
            return
        self._counts["model_opened"] += 1
        line.name = f"{line.chunk.chunk_id} {self._counts['model_opened']}"  # new: it misses messages to older ones
        self._named[line.name] = line
        self._outbox[line.address].append(self._wish(line))

    def _wish(self, line: Line) -> Open:
        chunk, sampling = line.chunk, line.chunk.sampling
        key = chunk.sample_key if self._config.shared_noise else other_key(chunk.sample_key)
        return Open(
            name=line.name,
            key=key,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            prompt_tokens=chunk.prompt_tokens,
            end=end_of(chunk),
            window=line.mode.window,
            coupled=line.mode.coupled,
            tokens=np.array(line.tokens, np.int32),
        )

    def _leave(self, line: Line) -> None:
        """Stops drafting for this line."""
        if line.address is not None:
            self._outbox[line.address].append(Stop(line.name))
            del self._named[line.name]
        line.address, line.guess = None, []

    def _give_back(self, line: Line) -> None:
        """Frees the drafter, which never joined or refuses this sample, for others; it continues without drafts."""
        self._leave(line)
        line.given_back = True
        self._counts["model_given_back"] += 1

    def _reconnect(self) -> None:
        met = self._met
        for address in [address for address in self._sockets if address not in met]:
            self._sockets.pop(address).close(linger=0)
            del self._outbox[address]
        for address in met:
            if address not in self._sockets:
                self._sockets[address], self._outbox[address] = self._connect(address), []
        self._sockets = {address: self._sockets[address] for address in met}
        for line in self._kept.take_all():
            if line.address in self._sockets:
                self._kept.put(line, self._clock())
            else:
                self._named.pop(line.name, None)
        for line in self._running.values():
            if line.address not in self._sockets:
                self._assign(line)

    def _connect(self, address: Address) -> zmq.Socket:
        socket = self._zmq.socket(zmq.DEALER)
        dial(socket, address)
        return socket

    def _send(self) -> None:
        for address, messages in self._outbox.items():
            if messages:
                try:
                    self._sockets[address].send(encode(messages), zmq.NOBLOCK)
                except zmq.Again:  # its queue is full; it requests missed messages by Unknown
                    self._counts["model_unsent"] += len(messages)
                messages.clear()

    def _read(self, frame: bytes) -> list[Message]:
        try:
            return decode(frame)
        except ValueError:  # a drafter of another release, perhaps: only its drafts are ignored
            self._counts["model_bad_frames"] += 1
            return []

    def _hear(self, address: Address, message: Message) -> None:
        if isinstance(message, Stepped):
            if message.samples > 0 <= message.step_us:
                self.performance.drafter_step(message.samples, message.step_us / 1e6, self._clock())
            return
        line = self._named.get(message.name)
        if line is None or line.address != address:
            return
        if isinstance(message, Unknown) and line.reopened and not line.joined:
            self._give_back(line)  # it is refused: it would be opened again after every step
        elif isinstance(message, Unknown):
            self._assign(line)
            line.reopened = True
        elif isinstance(message, Guess) and message.start <= len(line.tokens):
            joined = line.joined
            in_time = line.hear(message, self._config.patience_s, self._clock())
            tested, right = line.count(message.tested, message.accepted)
            if tested:
                self.performance.acceptance.count(DraftMethod.MODEL, right, tested, self._clock())
            self._counts["model_joined"] += line.joined and not joined
            self._counts["model_overtaken"] += not in_time
            self._counts["model_guesses"] += 1


def rank(sample: str, address: Address) -> bytes:
    """Returns the drafter's rank for a sample: the greatest drafts for it. Rendezvous hashing (Thaler, Ravishankar
    1998).
    """
    return blake2b(f"{sample}\0{address.endpoint}".encode(), digest_size=8).digest()


def other_key(key: int) -> int:
    """Returns a noise key independent of `key`."""
    return int.from_bytes(blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"tailrace-drafts").digest())


def _next(socket: zmq.Socket) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
