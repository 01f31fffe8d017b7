"""One thread of an engine's process that exchanges tokens with one shard.

Invariant: one exchange at a time, each with a deadline; whatever goes wrong costs drafts, is counted by cause, and is
tried again after a pause. What waits to be sent is bounded, the oldest goes first. Sending twice is harmless, so what
may not have arrived is sent again. Made by Feed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from tailrace.deployments.context.config import ContextConfig
from tailrace.deployments.context.group_log import NOWHERE, Cursor
from tailrace.deployments.context.live_groups import Packet, Want
from tailrace.deployments.messages.context import Fetched, GroupRef, Piece
from tailrace.kvpool.counts import Counts

IDLE_S = 1.0
"""Between looks while there is nothing to ask or to say; a group that is held ends it at once."""


class ShardExchange:
    """`deliver` is called by the lane's thread, the rest by the engine's; see Feed for what they mean."""

    def __init__(
        self, shard: ActorHandle, config: ContextConfig, writer: str, deliver: Callable[[Fetched], None], counts: Counts
    ):
        self._shard, self._config, self._writer = shard, config, writer
        self._deliver, self._counts = deliver, counts
        self._said: deque[tuple] = deque()  # (group, what to do with it) or a Piece
        self._wake, self._closed = threading.Event(), threading.Event()
        # The rest is the thread's own.
        self._wants: dict[GroupRef, Cursor] = {}
        self._resting: dict[GroupRef, Cursor] = {}
        self._due_s = 0.0  # when the next exchange takes place, however little there is to say
        self._new_groups: list[GroupRef] = []
        self._past: tuple[ObjectRef, list[GroupRef]] | None = None  # a question for history that is under way
        self._unsent: list[Piece] = []
        self._thread = threading.Thread(target=self._run, name="context-lane", daemon=True)
        self._thread.start()

    def hold(self, group: GroupRef) -> None:
        self._said.append((group, "hold"))
        self._wake.set()

    def rest(self, group: GroupRef) -> None:
        self._said.append((group, "rest"))

    def release(self, group: GroupRef) -> None:
        self._said.append((group, "release"))

    def append(self, group: GroupRef, sample_index: int, start: int, tokens: Sequence[int] | np.ndarray) -> None:
        self._said.append((group, sample_index, start, tokens))

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join(self._config.deadline_s)

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            busy = self._wants or self._unsent
            self._wake.wait(self._config.flush_s if busy else IDLE_S)
            self._wake.clear()
            self._listen()
            if self._closed.is_set():
                return
            if not (self._attempt(self._exchange) and self._attempt(self._ask_past)):
                self._closed.wait(self._config.retry_s)

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: drafts are lost, whatever has happened
            cause = getattr(error, "cause", None) or error
            self._counts.add(f"{work.__name__.strip('_')}_failed.{type(cause).__name__}")
            return False
        return True

    def _listen(self) -> None:
        """What the engine has said since the last time."""
        for _ in range(len(self._said)):
            match self._said.popleft():
                case (group, "hold"):
                    if group not in self._resting:
                        self._new_groups.append(group)
                    self._wants[group] = self._resting.pop(group, NOWHERE)
                    self._due_s = 0.0
                case (group, "rest"):
                    self._resting[group] = self._wants.pop(group, NOWHERE)
                case (group, "release"):
                    self._wants.pop(group, None)
                    self._resting.pop(group, None)
                case piece:
                    self._unsent.append(Piece(*piece))

    def _exchange(self) -> None:
        """One round with the shard, if there is enough to say, or time to ask."""
        began_s = time.monotonic()
        unsent_tokens = sum(len(piece.tokens) for piece in self._unsent)
        early = unsent_tokens < self._config.flush_tokens and began_s < self._due_s
        if early or not (self._wants or self._unsent):
            return
        self._due_s = began_s + self._config.linger_s
        self._unsent = _within(_joined(self._unsent), self._config.unsent_tokens, self._counts)
        packet, wants = Packet.of(self._unsent), [Want(*item) for item in self._wants.items()]
        call = self._shard.exchange.options(max_task_retries=0).remote(self._writer, packet, wants)
        news, cursors = ray.get(call, timeout=self._config.deadline_s)
        self._counts.took("exchange", time.monotonic() - began_s)
        self._unsent = []
        self._wants = {want.group: cursor for want, cursor in zip(wants, cursors, strict=True)}
        self._counts.add("sent_tokens", len(packet.tokens))
        self._counts.add("fetched_tokens", len(news.tokens))
        by_group: dict[GroupRef, list[Piece]] = {}
        for piece in news.pieces():
            by_group.setdefault(piece.group, []).append(piece)
        for group, pieces in by_group.items():
            self._deliver(Fetched(group, pieces, []))

    def _ask_past(self) -> None:
        """Ask for the history of new groups, and hand out what has come; an actor that restarts is asked again."""
        if self._past is None and self._new_groups:
            groups, self._new_groups = self._new_groups, []
            self._past = self._shard.past.remote(groups), groups
        if self._past is None or not ray.wait([self._past[0]], timeout=0)[0]:
            return
        call, groups = self._past
        self._past = None
        for group, answers in zip(groups, ray.get(call), strict=True):
            self._counts.add("history_tokens", sum(len(answer.tokens) for answer in answers))
            if answers:
                own = [answer._replace(tokens=answer.tokens.copy()) for answer in answers]  # Ray's are read-only
                self._deliver(Fetched(group, [], own))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Those of one sample that follow each other become one; int32."""
    runs: dict[tuple[GroupRef, int], list[tuple[int, list[np.ndarray]]]] = {}
    ends: dict[tuple[GroupRef, int], int] = {}
    for group, sample_index, start, tokens in pieces:
        key = group, sample_index
        if ends.get(key) != start:
            runs.setdefault(key, []).append((start, []))
        runs[key][-1][1].append(np.asarray(tokens, np.int32))
        ends[key] = start + len(tokens)
    return [Piece(*key, start, np.concatenate(parts)) for key, of in runs.items() for start, parts in of]


def _within(pieces: list[Piece], most_tokens: int, counts: Counts) -> list[Piece]:
    """The newest pieces, together of this many tokens at most."""
    left = sum(len(piece.tokens) for piece in pieces) - most_tokens
    first = 0
    while left > 0:
        left -= len(pieces[first].tokens)
        counts.add("dropped_tokens", len(pieces[first].tokens))
        first += 1
    return pieces[first:]
