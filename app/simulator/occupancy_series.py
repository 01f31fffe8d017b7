"""How busy the cluster was over time: moments at changes, few enough to keep and to draw.

Invariant: there are at most MOST, no two of them nearer than an interval that grows with the run, so that a quiet tail
keeps its changes. Called by `Host`.
"""

from collections.abc import Callable

from tailrace.app.simulator.types import Moment

MOST = 512
"""A picture has hardly more columns, and each moment asks every replica."""


class OccupancySeries:
    """`look` makes a moment of the present; it is asked for only when one is due."""

    def __init__(self, look: Callable[[float], Moment]):
        self._look, self._kept, self._gap_s = look, [], 0.0

    def note(self, now: float) -> None:
        if self._kept and now < self._kept[-1].at_s + self._gap_s:
            return
        self._kept.append(self._look(now))
        if len(self._kept) >= MOST:
            self._gap_s = max(2 * self._gap_s, 2 * (now - self._kept[0].at_s) / MOST)
            self._thin()

    def all(self, now: float) -> tuple[Moment, ...]:
        """All that are kept, and the last one at `now`."""
        return (*(moment for moment in self._kept if moment.at_s < now), self._look(now))

    def _thin(self) -> None:
        begin_s = self._kept[0].at_s
        first = sum(
            moment.at_s == begin_s for moment in self._kept
        )  # chunks run in the last moment of an instant alone
        kept = [self._kept[first - 1]]
        for moment in self._kept[first:]:
            if moment.at_s >= kept[-1].at_s + self._gap_s:
                kept.append(moment)
        self._kept = kept
