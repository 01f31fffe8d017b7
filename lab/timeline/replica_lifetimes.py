"""Lifetimes of replicas, and the start of closing of those that left.

A journal does not record when a replica began to close. One that leaves after a request for fewer replicas has been
closing since its first abort after its last start, or else since that request. `lab/timeline/record.py` calls the
methods in the order of events; seconds are the record's.
"""

from tailrace.lab.timeline.chunks import ReplicaLifetime


class ReplicaLifetimes:
    """Lifetimes by replica number: the place in `names`, in the order of joining. `asked`: (seconds, replicas, why)."""

    def __init__(self):
        self.names: dict[str, int] = {}
        self.up: dict[int, float] = {}  # by number: when each joined
        self.asked: list[tuple[float, int, str]] = []
        self._ended: list[list[ReplicaLifetime]] = []
        self._last_start: dict[int, float] = {}
        self._last_end: dict[int, float] = {}
        self._aborted: dict[int, float] = {}  # the first abort since the last start

    def join(self, replica_id: str, now_s: float) -> None:
        number = self.names.setdefault(replica_id, len(self.names))
        if number == len(self._ended):
            self._ended.append([])
        self.up.setdefault(number, now_s)

    def leave(self, number: int, now_s: float) -> None:
        closing_s = self._closing_s(number) if self._too_many() else None
        self._ended[number].append(ReplicaLifetime(self.up.pop(number), now_s, closing_s))

    def start(self, number: int, now_s: float) -> None:
        """Records that a chunk starts on a replica."""
        self._last_start[number] = now_s
        self._aborted.pop(number, None)

    def abort(self, replica_id: str, now_s: float) -> None:
        """Records that a chunk on a replica is aborted."""
        self._aborted.setdefault(self.names[replica_id], now_s)

    def stop(self, number: int, now_s: float) -> None:
        """Records that a chunk on a replica has ended."""
        self._last_end[number] = now_s

    def until(self, end_s: float) -> tuple[tuple[ReplicaLifetime, ...], ...]:
        """Returns all lifetimes up to end_s, by replica number."""
        closing = self._still_closing()
        found = [list(of_one) for of_one in self._ended]
        for number, joined_s in self.up.items():
            found[number].append(
                ReplicaLifetime(joined_s, end_s, self._closing_s(number) if number in closing else None)
            )
        return tuple(
            tuple(_cut(lifetime, end_s) for lifetime in of_one if lifetime.begin_s < end_s) for of_one in found
        )

    def _too_many(self) -> int:
        return max(0, len(self.up) - self.asked[-1][1]) if self.asked else 0

    def _too_many_since_s(self) -> float:
        """Returns the time since which all requests were for fewer replicas than are up."""
        since_s = self.asked[-1][0]
        for at_s, replicas, _ in reversed(self.asked):
            if replicas >= len(self.up):
                break
            since_s = at_s
        return since_s

    def _closing_s(self, number: int) -> float:
        asked_s = max(self._too_many_since_s(), self._last_start.get(number, 0.0))
        return max(self.up[number], min(asked_s, self._aborted.get(number, asked_s)))

    def _still_closing(self) -> list[int]:
        """Returns the replicas that are about to leave: the newest that have run nothing since the requests for fewer.

        Serve stops the newest replicas first.
        """
        if not self._too_many():
            return []
        since_s = self._too_many_since_s()
        idle = sorted((number for number in self.up if self._last_end.get(number, 0.0) <= since_s), reverse=True)
        return idle[: self._too_many()]


def _cut(lifetime: ReplicaLifetime, end_s: float) -> ReplicaLifetime:
    closing_s = None if lifetime.closing_s is None or lifetime.closing_s >= end_s else lifetime.closing_s
    return lifetime._replace(end_s=min(lifetime.end_s, end_s), closing_s=closing_s)
