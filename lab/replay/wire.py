"""The group context between modelled replicas: tokens of one replica's samples reach the others that run the group.

A live feed takes 50 to 250 ms; here tokens arrive before the reader's next step. Invariant: a reader gets the others'
tokens once and in order, and at its first read of a group all of them. Used by `lab.replay.speculation`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tailrace.deployments.messages.context import Fetched, GroupRef, Piece
from tailrace.lab.replay.recorded import Recorded


class Wire:
    """Log of each group's tokens, in order: (writer, sample, start, end)."""

    def __init__(self, recorded: Mapping[str, Recorded]):
        self.recorded = recorded
        self.made: defaultdict[GroupRef, list[tuple[int, int, int, int]]] = defaultdict(list)


class WireEnd:
    """A replica's end of the wire, in place of an engine's `Feed`."""

    def __init__(self, wire: Wire, writer: int):
        self._wire, self._writer = wire, writer
        self._held: dict[GroupRef, None] = {}
        self._read: dict[GroupRef, int] = {}

    def hold(self, group: GroupRef) -> None:
        self._held[group] = None

    def rest(self, group: GroupRef) -> None:
        del self._held[group]

    def release(self, group: GroupRef) -> None:
        """Drops a group whose index is given up: the next read of the group is a first one."""
        self._read.pop(group, None)

    def append(self, group: GroupRef, sample_index: int, start: int, tokens: Sequence[int]) -> None:
        self._wire.made[group].append((self._writer, sample_index, start, start + len(tokens)))

    def take(self) -> list[Fetched]:
        """Returns tokens of others since the last read; at the first read of a group all of them, and its history."""
        found = []
        for group in self._held:
            read, made = self._read.get(group), self._wire.made[group]
            if read == len(made):
                continue
            self._read[group] = len(made)
            recorded = self._wire.recorded[group.group_id]
            spans: dict[int, tuple[int, int]] = {}
            for writer, sample, start, end in made[read or 0 :]:
                if read is None or writer != self._writer:
                    spans[sample] = min(start, spans.get(sample, (start, end))[0]), end
            pieces = [Piece(group, n, a, recorded.answers[n][a:b]) for n, (a, b) in spans.items()]
            found.append(Fetched(group, pieces, list(recorded.history) if read is None else []))
        return found

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Does nothing: this end holds nothing open."""
