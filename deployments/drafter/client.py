"""An engine's side of the draft models: which drafter drafts for which sample, and what has come of it.

Invariant: what has not come is not proposed, and only a sample that takes turns with its drafter waits, never for long.
A guess counts only as far as it agrees with the tokens that the sample has by now, so one that was overtaken is no
harm. A sample has one line to its drafter over all its chunks here (`lines.py`); a line that brings nothing is given
back. It goes to the drafter that the sample's name ranks first, hence to the same one on whatever engine it runs; when
a drafter goes, only its samples move. Owned by `Drafts`, on the engine's thread; `meet` is called from another.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import zmq

from tailrace.deployments.draft_index.proposal import Proposal
from tailrace.deployments.drafter.config import DrafterConfig
from tailrace.deployments.drafter.lines import Kept, Line, chunk_end, end_of
from tailrace.deployments.drafter.server import Address
from tailrace.deployments.drafter.wire import Confirm, Guess, Message, Open, Stop, Unknown, decode, encode
from tailrace.deployments.messages.chunk import ChunkRequest
from tailrace.deployments.messages.context import Source
from tailrace.policies.protocol.actions import DraftMode

TRUST = 8.0
"""Draft tokens that what was seen of all samples is worth, beside what was seen of this one."""

FADE = 0.97
"""Of a sample's acceptance, per verification."""


class Drafters:
    """Of one engine; `meet` tells it of the first ones. `clock`: seconds."""

    def __init__(self, config: DrafterConfig, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock = config, clock
        self._zmq = zmq.Context()
        self._met: tuple[Address, ...] = ()  # as last heard
        self._sockets: dict[Address, zmq.Socket] = {}
        self._running: dict[str, Line] = {}  # by chunk id
        self._kept = Kept()
        self._named: dict[str, Line] = {}  # those that have a drafter, by the name it knows
        self._outbox: dict[Address, list[Message]] = {}
        self._counts: Counter[str] = Counter()
        self._accepted, self._tested = 1.0, 2.0  # of all samples, faded; the guess counts as two draft tokens

    def meet(self, addresses: Sequence[Address]) -> None:
        """These drafters are there now, and no others. From any thread."""
        self._met = tuple(sorted(set(addresses)))

    # ---- what `Drafts` tells it --------------------------------------------------------------------

    def open(self, chunk: ChunkRequest, way: DraftMode | None) -> None:
        """A chunk has been added that drafts. Its drafter hears of it before the step that computes the context here:
        it has to compute that too, unless it did so in the sample's chunk before."""
        line = self._taken_up(chunk, way or self._config.way)
        if line is None:
            line = Line(chunk, way or self._config.way, chunk.token_ids.tolist())
            self._assign(line)
        self._running[chunk.chunk_id] = line
        self._send()

    def made(self, chunk_id: str, tokens: list[int]) -> None:
        """The chunk has these tokens more."""
        line = self._running[chunk_id]
        self._confirm(line, tokens)
        line.made(tokens, self._clock())
        if line.hopeless:
            self._give_back(line)

    def judge(self, chunk_id: str, accepted: int, drafted: int) -> None:
        """Of `drafted` tokens of a draft model the first `accepted` were right."""
        line, tested = self._running[chunk_id], min(accepted + 1, drafted)
        line.accepted, line.tested = FADE * line.accepted + accepted, FADE * line.tested + tested
        self._accepted, self._tested = FADE * self._accepted + accepted, FADE * self._tested + tested

    def close(self, chunk_id: str, goes_on: bool = False) -> tuple[int, int]:
        """The chunk has ended: drafts whose turn came in it, verified or overtaken, and those of them that were right.

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
        """Close lines that nobody has taken up; now and then, also while nothing runs."""
        for line in self._kept.take_old(self._clock()):
            self._leave(line)
        self._send()

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
        if len(line.tokens) >= chunk_end(line.chunk):
            return False
        waits = line.waits(self._clock())
        self._counts["model_late"] += not waits
        if line.hopeless:
            self._give_back(line)
        return waits

    def proposal(self, chunk_id: str) -> Proposal:
        """What the draft model says follows, a window at most; each token as likely right as those before were, so far.

        What is after the window is for the next step: it is there while the drafter hears what has come of this one.
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
        """Since the start: lines opened, taken up by another chunk, joined by their drafter, and given back because it
        never joined (`model_opened`, `model_resumed`, `model_joined`, `model_given_back`); guesses that came, those
        that were overtaken, waits given up. Now: drafters; lines, of which not joined yet (`model_lines`,
        `model_unjoined`), of which without a chunk (`model_kept`)."""
        lines = self._named.values()
        now = {"drafters": len(self._sockets), "model_lines": len(lines), "model_kept": len(self._kept)}
        return dict(self._counts) | now | {"model_unjoined": sum(not line.joined for line in lines)}

    def stop(self) -> None:
        self._zmq.destroy(linger=0)

    # ------------------------------------------------------------------------------------------------

    def _taken_up(self, chunk: ChunkRequest, way: DraftMode) -> Line | None:
        """The line that the sample's last chunk here has left, with what was made since; None: there is none."""
        plan = chunk.draft
        line = self._kept.take((plan.group.group_id, plan.sample_index))
        if line is None:
            return None
        if not line.extends_to(chunk) or not way.window:
            self._leave(line)
            return None
        self._counts["model_resumed"] += line.address is not None
        another = (way, end_of(chunk)) != (line.way, end_of(line.chunk))
        line.chunk, line.way = chunk, way
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
        """To the drafter that ranks first for this sample, with all that is known of it; to none for no window."""
        self._named.pop(line.name, None)
        sample = "{}#{}".format(*line.sample)
        drafters = self._sockets if line.way.window else ()
        line.address, line.guess = max(drafters, key=lambda a: rank(sample, a), default=None), []
        line.silent, line.since_s, line.patience_s = False, self._clock(), self._config.patience_s
        line.late, line.alone, line.joined, line.given_back, line.said = 0, 0, False, False, (0, 0)
        if line.address is None:
            return
        self._counts["model_opened"] += 1
        line.name = f"{line.chunk.chunk_id} {self._counts['model_opened']}"  # what an older one is told is not for it
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
            window=line.way.window,
            coupled=line.way.coupled,
            tokens=np.array(line.tokens, np.int32),
        )

    def _leave(self, line: Line) -> None:
        """Its drafter drafts for it no more."""
        if line.address is not None:
            self._outbox[line.address].append(Stop(line.name))
            del self._named[line.name]
        line.address, line.guess = None, []

    def _give_back(self, line: Line) -> None:
        """Its drafter never joins: it is free for others, and this sample continues alone."""
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
        line = self._named.get(message.name)
        if line is None or line.address != address:
            return
        if isinstance(message, Unknown):
            self._assign(line)
        elif isinstance(message, Guess) and message.start <= len(line.tokens):
            joined = line.joined
            in_time = line.hear(message, self._config.patience_s, self._clock())
            line.count(message.tested, message.accepted)
            self._counts["model_joined"] += line.joined and not joined
            self._counts["model_overtaken"] += not in_time
            self._counts["model_guesses"] += 1


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
