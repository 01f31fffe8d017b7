"""One thread of an engine's process that exchanges tokens with one shard.

Invariant: one exchange runs at a time, each with a deadline. Any failure costs drafts, is counted by cause, and is
retried after a pause. Unsent tokens are bounded; the oldest are dropped first. Sending twice is harmless, so tokens
that may not have arrived are sent again. Ray is imported by the thread: an engine by itself runs without it. Created
by ContextClient.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tailrace.deployments.context.context_config import ContextConfig
from tailrace.deployments.context.group_log import NOWHERE, Cursor
from tailrace.deployments.context.live_groups import Packet, Want
from tailrace.deployments.context.shard_handles import NoShard, ShardHandles
from tailrace.deployments.messages.context import Fetched, GroupRef, Piece
from tailrace.kvpool.counts import Counts

if TYPE_CHECKING:
    from ray import ObjectRef

IDLE_S = 1.0
"""Seconds between rounds while there is nothing to fetch or send; holding a group ends the pause at once."""


class ShardExchange:
    """Its own thread calls `deliver`; the engine's thread calls the methods. See ContextClient for what they do."""

    def __init__(
        self,
        index: int,
        shards: ShardHandles,
        config: ContextConfig,
        writer: str,
        deliver: Callable[[Fetched], None],
        counts: Counts,
    ):
        self._index, self._shards, self._config, self._writer = index, shards, config, writer
        self._deliver, self._counts = deliver, counts
        self._said: deque[tuple] = deque()  # (group, "hold", "rest" or "release") or a Piece
        self._wake, self._closed = threading.Event(), threading.Event()
        # The fields below belong to the thread.
        self._wants: dict[GroupRef, Cursor] = {}
        self._resting: dict[GroupRef, Cursor] = {}
        self._due_s = 0.0  # time of the next exchange, however little there is to send
        self._new_groups: list[GroupRef] = []
        self._past: tuple[ObjectRef, list[GroupRef]] | None = None  # a request for history under way
        self._unsent: list[Piece] = []
        self._thread = threading.Thread(target=self._run, name="shard-exchange", daemon=True)
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
        from ray.exceptions import RayActorError

        try:
            work()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: drafts are lost, whatever has happened
            cause = getattr(error, "cause", None) or error
            self._counts.add(f"{work.__name__.strip('_')}_failed.{type(cause).__name__}")
            if isinstance(error, NoShard | RayActorError):
                self._shards.lose(self._index)
            return False
        return True

    def _listen(self) -> None:
        """Processes the engine's calls since the last time."""
        for _ in range(len(self._said)):
            group, *said = self._said.popleft()
            match said:
                case ["hold"]:
                    if group not in self._resting:
                        self._new_groups.append(group)
                    self._wants[group] = self._resting.pop(group, NOWHERE)
                    self._due_s = 0.0
                case ["rest"]:
                    self._resting[group] = self._wants.pop(group, NOWHERE)
                case ["release"]:
                    self._wants.pop(group, None)
                    self._resting.pop(group, None)
                case piece:
                    self._unsent.append(Piece(group, *piece))

    def _exchange(self) -> None:
        """Runs one round with the shard, if enough is to be sent, or it is time to fetch."""
        import ray

        began_s = time.monotonic()
        unsent_tokens = sum(len(piece.tokens) for piece in self._unsent)
        early = unsent_tokens < self._config.flush_tokens and began_s < self._due_s
        if early or not (self._wants or self._unsent):
            return
        self._due_s = began_s + self._config.linger_s
        self._unsent = _within(_joined(self._unsent), self._config.unsent_tokens, self._counts)
        packet, wants = Packet.of(self._unsent), [Want(*item) for item in self._wants.items()]
        call = self._shards.at(self._index).exchange.options(max_task_retries=0).remote(self._writer, packet, wants)
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
        """Requests the history of new groups, and delivers histories that have arrived; an actor that restarts is asked
        again.
        """
        import ray
        from ray.exceptions import RayActorError

        if self._past is None and self._new_groups:
            groups = self._new_groups
            self._past = self._shards.at(self._index).past.remote(groups), groups
            self._new_groups = []
        if self._past is None or not ray.wait([self._past[0]], timeout=0)[0]:
            return
        (call, groups), self._past = self._past, None
        try:
            answer = ray.get(call)
        except (NoShard, RayActorError):
            self._new_groups += groups
            raise
        for group, answers in zip(groups, answer, strict=True):
            self._counts.add("history_tokens", sum(len(answer.tokens) for answer in answers))
            if answers:
                own = [answer._replace(tokens=answer.tokens.copy()) for answer in answers]  # Ray's are read-only
                self._deliver(Fetched(group, [], own))


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Joins consecutive pieces of one sample; int32."""
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
    """Returns the last pieces, with `most_tokens` or fewer in total; each of the others is dropped whole."""
    left = sum(len(piece.tokens) for piece in pieces) - most_tokens
    first = 0
    while left > 0:
        left -= len(pieces[first].tokens)
        counts.add("dropped_tokens", len(pieces[first].tokens))
        first += 1
    return pieces[first:]
