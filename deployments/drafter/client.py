"""An engine's side of the draft models: which drafter drafts for which sample, and what has come of it.

Invariant: nothing here waits; what has not come is not proposed. A guess counts only as far as it agrees with the
tokens that the sample has by now, so one that was overtaken is no harm. A sample goes to the drafter that its name
ranks first, hence to the same one on whatever engine it runs; when a drafter goes, only its samples move. Owned by
`Drafts`, on the engine's thread; `meet` is called from another.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import zmq

from tailrace.deployments.draft_index.proposal import Proposal
from tailrace.deployments.drafter.config import DrafterConfig
from tailrace.deployments.drafter.server import Address
from tailrace.deployments.drafter.wire import Confirm, Guess, Message, Open, Stop, Unknown, decode, encode
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Source
from tailrace.policies.protocol.actions import DraftMode

PATIENCE_S = 0.5
"""Longest wait of a sample that takes turns with its drafter; then it goes on alone until a draft comes."""

TRUST = 8.0
"""Draft tokens that what was seen of all samples is worth, beside what was seen of this one."""

FADE = 0.97
"""Of a sample's acceptance, per verification."""


@dataclass(slots=True)
class Line:
    """A chunk's line to its drafter. `tokens`: its context and what was made since."""

    chunk: ChunkRequest
    way: DraftMode
    tokens: list[int]
    address: Address | None = None  # of its drafter; None: there is none
    guess: list[int] = field(default_factory=list)  # for what follows `tokens`
    since_s: float = 0.0  # that it has had no guess
    silent: bool = False  # waits no more until a guess comes
    accepted: float = 0.0  # of
    tested: float = 0.0  # draft tokens that were verified, both faded
    judged: tuple[int, int] = (0, 0)  # drafts whose turn came, those that were right: as its drafter said last


class Drafters:
    """Of one engine; `meet` tells it of the first ones."""

    def __init__(self, config: DrafterConfig):
        self._config = config
        self._zmq = zmq.Context()
        self._met: tuple[Address, ...] = ()  # as last heard
        self._sockets: dict[Address, zmq.Socket] = {}
        self._running: dict[str, Line] = {}
        self._outbox: dict[Address, list[Message]] = {}
        self._counts: Counter[str] = Counter()
        self._accepted, self._tested = 1.0, 2.0  # of all samples, faded; the guess counts as two draft tokens

    def meet(self, addresses: Sequence[Address]) -> None:
        """These drafters are there now, and no others. From any thread."""
        self._met = tuple(sorted(set(addresses)))

    # ---- what `Drafts` tells it --------------------------------------------------------------------

    def open(self, chunk: ChunkRequest, way: DraftMode | None) -> None:
        """A chunk has been added that drafts. Its drafter hears of it before the step that computes the context here:
        it has to compute that too."""
        line = Line(chunk, way or self._config.way, chunk.token_ids.tolist())
        self._running[chunk.chunk_id] = line
        self._assign(line)
        self._send()

    def made(self, chunk_id: str, tokens: list[int]) -> None:
        """The chunk has these tokens more."""
        line = self._running[chunk_id]
        if line.address is not None:
            self._outbox[line.address].append(Confirm(chunk_id, len(line.tokens), list(tokens)))
        line.tokens += tokens
        line.guess = behind(line.guess, tokens)
        line.since_s = time.monotonic()

    def judge(self, chunk_id: str, accepted: int, drafted: int) -> None:
        """Of `drafted` tokens of a draft model the first `accepted` were right."""
        line, tested = self._running[chunk_id], min(accepted + 1, drafted)
        line.accepted, line.tested = FADE * line.accepted + accepted, FADE * line.tested + tested
        self._accepted, self._tested = FADE * self._accepted + accepted, FADE * self._tested + tested

    def close(self, chunk_id: str) -> tuple[int, int]:
        """The chunk has ended: drafts whose turn came, verified or overtaken, and those of them that were right."""
        line = self._running.pop(chunk_id)
        if line.address is not None:
            self._outbox[line.address].append(Stop(chunk_id))
        self._send()
        return line.judged

    # ---- what it does ------------------------------------------------------------------------------

    def exchange(self) -> None:
        """Say what has happened since the last time, and take in what has come; once a step."""
        if self._met != tuple(self._sockets):
            self._reconnect()
        self._send()
        for address, socket in self._sockets.items():
            while (frame := _next(socket)) is not None:
                for message in self._read(frame):
                    self._hear(address, message)

    def waits(self, chunk_id: str) -> bool:
        """Whether the chunk had better sit out the next step: its drafter waits for it, and it for its drafter."""
        line = self._running[chunk_id]
        if not line.way.coupled or line.guess or line.silent or line.address is None:
            return False
        if len(line.tokens) >= end_of(line.chunk):
            return False
        line.silent = time.monotonic() - line.since_s > PATIENCE_S
        self._counts["model_late"] += line.silent
        return not line.silent

    def proposal(self, chunk_id: str) -> Proposal:
        """What the draft model says follows, a window at most; each token as likely right as those before were, so far.

        What is behind the window is for the next step: it is there while the drafter hears what has come of this one.
        """
        line = self._running[chunk_id]
        guess, trusted = line.guess[: line.way.window], TRUST * self._accepted / self._tested
        right, count = (trusted + line.accepted) / (TRUST + line.tested), len(guess)
        tokens, sources = np.array(guess, np.int32), np.full(count, Source.MODEL, np.uint8)
        return Proposal(tokens, np.full(count, right, np.float32), sources, 0)

    @property
    def reached(self) -> bool:
        """Whether there is a drafter, as of the last exchange."""
        return bool(self._sockets)

    def counts(self) -> dict[str, int]:
        """Since the start: guesses that came, those that were overtaken, chunks opened, waits given up."""
        return dict(self._counts) | {"drafters": len(self._sockets)}

    def stop(self) -> None:
        self._zmq.destroy(linger=0)

    # ------------------------------------------------------------------------------------------------

    def _assign(self, line: Line) -> None:
        """To the drafter that ranks first for this sample, with all that is known of it; to none for no window."""
        chunk = line.chunk
        plan, sampling = chunk.draft, chunk.sampling
        sample = f"{plan.group.group_id}#{plan.sample_index}"
        drafters = self._sockets if line.way.window else ()
        line.address, line.guess = max(drafters, key=lambda a: rank(sample, a), default=None), []
        line.silent, line.since_s = False, time.monotonic()
        if line.address is None:
            return
        key = chunk.sample_key if self._config.shared_noise else other_key(chunk.sample_key)
        wish = Open(
            chunk.chunk_id, key, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p,
            list(sampling.stop_token_ids), chunk.prompt_tokens, end_of(chunk), *line.way,
            np.array(line.tokens, np.int32),
        )  # fmt: skip
        self._outbox[line.address].append(wish)
        self._counts["model_opened"] += 1

    def _reconnect(self) -> None:
        met = self._met
        for address in [address for address in self._sockets if address not in met]:
            self._sockets.pop(address).close(linger=0)
            del self._outbox[address]
        for address in met:
            if address not in self._sockets:
                self._sockets[address], self._outbox[address] = self._connect(address), []
        self._sockets = {address: self._sockets[address] for address in met}
        for line in self._running.values():
            if line.address not in self._sockets:
                self._assign(line)

    def _connect(self, address: Address) -> zmq.Socket:
        socket = self._zmq.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey, socket.linger = address.key, 0
        socket.ipv6 = "[" in address.endpoint
        socket.connect(address.endpoint)
        return socket

    def _send(self) -> None:
        for address, messages in self._outbox.items():
            if messages:
                try:
                    self._sockets[address].send(encode(messages), zmq.NOBLOCK)
                except zmq.Again:  # it takes nothing any more; what it missed it will ask for, by Unknown
                    self._counts["model_unsent"] += len(messages)
                messages.clear()

    def _read(self, frame: bytes) -> list[Message]:
        try:
            return decode(frame)
        except ValueError:  # another release, perhaps: its drafts are not understood, and nobody else is harmed
            self._counts["model_bad_frames"] += 1
            return []

    def _hear(self, address: Address, message: Message) -> None:
        line = self._running.get(message.name)
        if line is None or line.address != address:
            return
        if isinstance(message, Unknown):
            self._assign(line)
        elif isinstance(message, Guess) and message.start <= len(line.tokens):
            known = line.tokens[message.start :]
            overtaken = known != message.tokens[: len(known)]
            line.guess = line.guess if overtaken else message.tokens[len(known) :]
            line.silent, line.judged = line.silent and overtaken, (message.tested, message.accepted)
            self._counts["model_overtaken"] += overtaken
            self._counts["model_guesses"] += 1


def end_of(chunk: ChunkRequest) -> int:
    """Position from which on no draft is wanted: the last token of a chunk is never a draft's."""
    return len(chunk.token_ids) + chunk.max_tokens - 1


def behind(guess: list[int], tokens: list[int]) -> list[int]:
    """What is left of a guess when these tokens have come; nothing, when one of them is another."""
    return guess[len(tokens) :] if guess[: len(tokens)] == tokens else []


def rank(sample: str, address: Address) -> bytes:
    """Rendezvous hashing (Thaler, Ravishankar 1998): the greatest rank of a sample names its drafter."""
    return blake2b(f"{sample}\0{address.endpoint}".encode(), digest_size=8).digest()


def other_key(key: int) -> int:
    """A key of noise that has nothing to do with this one's."""
    return int.from_bytes(blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"tailrace-drafts").digest())


def _next(socket: zmq.Socket) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
