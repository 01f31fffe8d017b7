"""The groups in flight of one shard: their logs, and what travels between a shard and the engines' feeds.

Invariant: memory is bounded. A group that nobody has touched for `ttl_s` is forgotten, and beyond `most_bytes` the one
longest untouched goes first; whoever reads on in a forgotten group starts again from what is there then. A plain
object whose clock is an argument, `now_s`. Called by ContextShard.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from deployments.context.log import Cursor, GroupLog
from deployments.context.types import GroupRef, Piece

COORDINATOR = ""
"""The writer of answers that are whole."""


class Packet(NamedTuple):
    """Pieces as they travel: row i is (place in `groups`, sample index, start, length), its tokens in that order."""

    groups: list[GroupRef]
    rows: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, pieces: list[Piece]) -> "Packet":
        places: dict[GroupRef, int] = {}
        rows = [(places.setdefault(p.group, len(places)), p.sample_index, p.start, len(p.tokens)) for p in pieces]
        tokens = np.concatenate([p.tokens for p in pieces]) if pieces else ()
        return cls(list(places), np.array(rows, np.int32).reshape(-1, 4), np.asarray(tokens, np.int32))

    def pieces(self) -> Iterator[Piece]:
        """Their tokens are parts of one array, which is this process's own and may be written to."""
        tokens = self.tokens if self.tokens.flags.writeable else self.tokens.copy()
        at = 0
        for place, sample_index, start, length in self.rows.tolist():
            yield Piece(self.groups[place], sample_index, start, tokens[at : at + length])
            at += length


class Want(NamedTuple):
    """A group that a reader runs, and how far it has read."""

    group: GroupRef
    cursor: Cursor


class LiveGroups:
    """`first_era`: a positive number above every one that an earlier object under the same name can have used."""

    def __init__(self, ttl_s: float, most_bytes: float, first_era: int):
        self._ttl_s, self._most_bytes, self._era = ttl_s, most_bytes, first_era
        self._logs: OrderedDict[GroupRef, tuple[GroupLog, float]] = OrderedDict()  # with when each was last touched
        self._writers = {COORDINATOR: 0}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._logs)

    def append(self, writer: str, packet: Packet, now_s: float) -> None:
        """Every piece of a packet; see GroupLog.append."""
        number = self._writers.setdefault(writer, len(self._writers))
        logs = [self._touch(group, now_s) for group in packet.groups]
        self.nbytes -= sum(log.nbytes for log in logs)
        tokens, at = memoryview(packet.tokens), 0
        for place, sample_index, start, length in packet.rows.tolist():
            logs[place].append(number, sample_index, start, tokens[at : at + length])
            at += length
        self.nbytes += sum(log.nbytes for log in logs)
        self.sweep(now_s)

    def fetch(self, reader: str, wants: list[Want], now_s: float) -> tuple[Packet, list[Cursor]]:
        """What is new in each group since its cursor, and the cursors after it. `reader` gets nothing that it wrote
        itself as `writer`, but for a first look."""
        number = self._writers.setdefault(reader, len(self._writers))
        cursors, rows, tokens = [], [], []
        for place, want in enumerate(wants):
            spans, cursor = self._touch(want.group, now_s).fetch(want.cursor, number)
            cursors.append(cursor)
            if len(spans.rows):
                rows.append(np.insert(spans.rows, 0, place, axis=1))
                tokens.append(spans.tokens)
        none = np.empty((0, 4), np.int32), np.empty(0, np.int32)
        columns = (np.concatenate(rows), np.concatenate(tokens)) if rows else none
        return Packet([want.group for want in wants], *columns), cursors

    def finish(self, group: GroupRef, lengths: dict[int, int], now_s: float) -> None:
        """These samples have ended, at these lengths in tokens."""
        log = self._touch(group, now_s)
        for sample_index, length in lengths.items():
            log.finish(sample_index, length)

    def forget(self, group: GroupRef) -> None:
        """Nobody runs a sample of this group any more."""
        if group in self._logs:
            self.nbytes -= self._logs.pop(group)[0].nbytes

    def sweep(self, now_s: float) -> None:
        """Forget what is too old or too much, longest untouched first."""
        while self._logs:
            group, (_, touched_s) = next(iter(self._logs.items()))
            if self.nbytes <= self._most_bytes and touched_s + self._ttl_s > now_s:
                return
            self.forget(group)

    def find(self, name: str) -> tuple[GroupRef, GroupLog] | None:
        """The youngest group of this group id, prompt id or prompt key."""
        for group in reversed(self._logs):
            if name in (group.group_id, group.prompt_key) or group.group_id.endswith(f"/{name}"):
                return group, self._logs[group][0]
        return None

    def _touch(self, group: GroupRef, now_s: float) -> GroupLog:
        if group not in self._logs:
            self._era += 1
            self._logs[group] = GroupLog(self._era), now_s
        log = self._logs[group][0]
        self._logs[group] = log, now_s
        self._logs.move_to_end(group)
        return log
