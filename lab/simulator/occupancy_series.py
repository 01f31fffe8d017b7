"""How busy the cluster was over time: moments few enough to keep and to draw.

Invariant: a moment is of a state that lasted, never of one within an instant or a hand-over, where no chunk seems to
run; and a stretch without events has moments of its own, since KV grows in it. Called by `Host`.
"""

from collections.abc import Callable
from itertools import pairwise
from math import inf

from tailrace.lab.simulator.types import Moment

MOST = 512
"""Maximum number of moments: a picture has hardly more columns, and each moment asks every replica."""

QUIET_LOOKS = 8
"""Number of looks in a stretch without events."""


class OccupancySeries:
    """`look` makes a moment of the present, or of a time before the next event."""

    def __init__(self, look: Callable[[float], Moment]):
        self._look, self._kept, self._gap_s = look, [], 0.0
        self._lasted_s = 0.0  # by the state of the last moment

    def note(self, now: float, until: float) -> None:
        """Records that no event comes after `now` and before `until`."""
        if until <= now:
            return
        if not self._kept or now >= self._kept[-1].at_s + self._gap_s:
            self._kept.append(self._look(now))
        elif until - now > self._lasted_s:
            self._kept[-1] = self._look(now)
        if self._kept[-1].at_s == now:
            self._lasted_s = until - now
            looks = QUIET_LOOKS if until - now > QUIET_LOOKS * self._gap_s else int((until - now) / self._gap_s)
            for look in range(1, looks):
                at_s = now + (until - now) * look / looks
                if self._kept[-1].at_s < at_s < until:  # else the stretch is too short for the clock
                    self._kept.append(self._look(at_s))
        if len(self._kept) >= MOST:
            self._gap_s = max(2 * self._gap_s, 2 * (now - self._kept[0].at_s) / MOST)
            self._thin()

    def all(self, now: float) -> tuple[Moment, ...]:
        """Returns all that are kept, and the last one at `now`."""
        return (*(moment for moment in self._kept if moment.at_s < now), self._look(now))

    def _thin(self) -> None:
        """Keeps of moments that are too near to each other the one that lasted longest."""
        kept, lasted_s = [self._kept[0]], inf  # a curve begins at the beginning
        for moment, after in pairwise([*self._kept[1:], None]):
            lasts_s = after.at_s - moment.at_s if after else inf
            if moment.at_s >= kept[-1].at_s + self._gap_s:
                kept.append(moment)
                lasted_s = lasts_s
            elif lasts_s > lasted_s:
                kept[-1] = moment
                lasted_s = lasts_s
        self._kept = kept
