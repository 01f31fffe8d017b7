"""The groups in flight of one shard: their logs, and the packets between a shard and the engines' context clients.

Invariant: memory is bounded. A group without access for `ttl_s` is dropped, and beyond `most_bytes` the least recently
used group is dropped first. A reader of a dropped group starts again from the new log. A plain object whose clock is an
argument, `now_s`. Called by ContextShard.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from tailrace.deployments.context.group_log import NO_ENTRIES, NO_TOKENS, Cursor, GroupLog
from tailrace.deployments.messages.context import GroupRef, Piece

COORDINATOR = ""
"""Writer of answers that are whole."""

MAX_WRITERS = 4096
"""Maximum number of engines whose numbers are kept: eight times the largest cluster. An engine that is dropped and
comes back reads its own tokens once more.
"""


class Packet(NamedTuple):
    """Pieces as they are sent: row i is (index in `groups`, sample index, start, length), with its tokens in that
    order.
    """

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
        """Yields the pieces. Their tokens are parts of one array, which belongs to this process and may be written
        to.
        """
        tokens = self.tokens if self.tokens.flags.writeable else self.tokens.copy()
        at = 0
        for place, sample_index, start, length in self.rows.tolist():
            yield Piece(self.groups[place], sample_index, start, tokens[at : at + length])
            at += length


class Want(NamedTuple):
    """A group that a reader runs, and the position that it has read up to."""

    group: GroupRef
    cursor: Cursor


class LiveGroups:
    """`first_era`: a positive number above all that an earlier object under the same name can have used."""

    def __init__(self, ttl_s: float, most_bytes: float, first_era: int):
        self._ttl_s, self._most_bytes, self._era = ttl_s, most_bytes, first_era
        self._logs: OrderedDict[GroupRef, tuple[GroupLog, float]] = OrderedDict()  # with the time of the last access
        self._writers: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._numbers = count()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._logs)

    def append(self, writer: str, packet: Packet, now_s: float) -> None:
        """Appends every piece of a packet; see GroupLog.append."""
        number = self._number(writer)
        logs = [self._touch(group, now_s) for group in packet.groups]
        self.nbytes -= sum(log.nbytes for log in logs)
        tokens, at = memoryview(packet.tokens), 0
        for place, sample_index, start, length in packet.rows.tolist():
            logs[place].append(number, sample_index, start, tokens[at : at + length])
            at += length
        self.nbytes += sum(log.nbytes for log in logs)
        self.sweep(now_s)

    def fetch(self, reader: str, wants: list[Want], now_s: float) -> tuple[Packet, list[Cursor]]:
        """Returns the new entries of each group since its cursor, and the cursors after them. `reader` does not get
        what it wrote itself as `writer`, except on its first call.
        """
        number = self._number(reader)
        looks = [self._touch(want.group, now_s).since(want.cursor) for want in wants]
        counts = [len(entries) for entries, _, _ in looks]
        places = np.repeat(np.arange(len(wants), dtype=np.int32), counts)
        entries = np.concatenate([NO_ENTRIES, *(entries for entries, _, _ in looks)])
        tokens = np.concatenate([NO_TOKENS, *(tokens for _, tokens, _ in looks)])
        offsets = np.cumsum(entries[:, 3]) - entries[:, 3]
        wanted = entries[:, 0] != number
        entries[:, 0] = places
        joined = _joined(entries[wanted], offsets[wanted], tokens)
        return Packet([want.group for want in wants], *joined), [cursor for _, _, cursor in looks]

    def finish(self, group: GroupRef, lengths: dict[int, int], now_s: float) -> None:
        """Records that these samples have ended, at these lengths in tokens."""
        log = self._touch(group, now_s)
        for sample_index, length in lengths.items():
            log.finish(sample_index, length)

    def forget(self, group: GroupRef) -> None:
        """Drops a group that has no running sample."""
        if group in self._logs:
            self.nbytes -= self._logs.pop(group)[0].nbytes

    def sweep(self, now_s: float) -> None:
        """Drops groups beyond the time or memory limit, least recently used first."""
        while self._logs:
            group, (_, touched_s) = next(iter(self._logs.items()))
            if self.nbytes <= self._most_bytes and touched_s + self._ttl_s > now_s:
                return
            self.forget(group)

    def find(self, name: str) -> tuple[GroupRef, GroupLog] | None:
        """Returns the newest group with this group id, prompt id or prompt key."""
        for group in reversed(self._logs):
            if name in (group.group_id, group.prompt_key) or group.group_id.endswith(f"/{name}"):
                return group, self._logs[group][0]
        return None

    def _number(self, name: str) -> int:
        """Returns the number of a writer or reader, unique among all of them."""
        if name not in self._writers:
            self._writers[name] = next(self._numbers)
            if len(self._writers) > MAX_WRITERS:
                self._writers.popitem(last=False)
        self._writers.move_to_end(name)
        return self._writers[name]

    def _touch(self, group: GroupRef, now_s: float) -> GroupLog:
        if group not in self._logs:
            self._era += 1
            self._logs[group] = GroupLog(self._era), now_s
        log = self._logs[group][0]
        self._logs[group] = log, now_s
        self._logs.move_to_end(group)
        return log


def _joined(rows: np.ndarray, offsets: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts rows of a Packet, and their tokens with them; consecutive rows of a sample become one."""
    order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))
    rows, offsets = rows[order], offsets[order]
    lengths = rows[:, 3]
    ends = np.cumsum(lengths)
    picked = tokens[np.repeat(offsets - (ends - lengths), lengths) + np.arange(lengths.sum())]
    same, follows = (rows[1:, :2] == rows[:-1, :2]).all(axis=1), rows[1:, 2] == rows[:-1, 2] + lengths[:-1]
    first = np.flatnonzero(np.concatenate(([True], ~(same & follows)))[: len(rows)])
    joined = rows[first]
    joined[:, 3] = np.add.reduceat(lengths, first) if len(rows) else 0
    return joined, picked
