"""How long a trajectory pauses between two turns: by its own earlier gaps, by those after the same tool, and by all.

Gaps are counted by powers of two of a second. O(1) a gap. Called by `policies.core.trajectory_book`.
"""

from math import frexp, inf

PRIOR_S = 10.0
"""Seconds of the first gap, before any was seen: coding agents' tools take 9 s in the median."""

TOOL_GAPS, ALL_GAPS = 4.0, 1.0
"""Weights of the gaps after the same tool, and of all, in gaps of the trajectory itself, which resemble each other."""

BINS, FIRST = 24, 4
"""Number of bins, and binary digits of the first one's end: it has gaps below 1/16 s, the last from three days on."""


MAX_TOOLS = 1_024
"""Maximum number of tools that are told apart; agents name them."""


class GapCounts:
    """Gaps by bin: their number, and the sum of their seconds."""

    __slots__ = ("gaps", "sums")

    def __init__(self):
        self.gaps, self.sums = [0.0] * BINS, [0.0] * BINS

    def add(self, gap_s: float) -> None:
        place = _bin(gap_s)
        self.gaps[place] += 1
        self.sums[place] += gap_s

    def add_to(self, gaps: list[float], sums: list[float], weight: float | None) -> None:
        """Adds these gaps to others. `weight`: of all together, or None if each counts as one."""
        share = 1.0 if weight is None else weight / max(1.0, sum(self.gaps))
        for place in range(BINS):
            gaps[place] += share * self.gaps[place]
            sums[place] += share * self.sums[place]


def _bin(gap_s: float) -> int:
    return min(BINS - 1, max(0, frexp(gap_s)[1] + FIRST))


class GapBelief:
    def __init__(self):
        self._all = GapCounts()
        self._all.add(PRIOR_S)
        self._tools: dict[str, GapCounts] = {}
        self._own: dict[str, GapCounts] = {}  # by sample id

    def left_s(self, sample_id: str, tool: str, waited_s: float = 0.0) -> float:
        """Returns the expected seconds that are left of a gap which lasts for `waited_s` already; as long again if no
        gap lasted longer. `tool`: the one that was called, or empty if none is known.
        """
        gaps, sums, first = self._beyond(sample_id, tool, waited_s)
        number = sum(gaps[first:])
        return max(0.0, sum(sums[first:]) / number - waited_s) if number else waited_s

    def price_s(self, sample_id: str, tool: str, waited_s: float) -> float:
        """Returns the expected seconds of waiting for each return that comes, up to the best time to give up: so long
        gaps, which nobody waits out, do not count. As long again if no gap lasted longer.
        """
        gaps, sums, first = self._beyond(sample_id, tool, waited_s)
        number, returned, spent_s, best_s = sum(gaps[first:]), 0.0, 0.0, inf
        for place in range(first, BINS):
            if gaps[place]:
                returned += gaps[place]
                spent_s += sums[place] - gaps[place] * waited_s
                rest_s = (number - returned) * (2.0 ** (place - FIRST) - waited_s)
                best_s = min(best_s, (spent_s + rest_s) / returned)
        return max(0.0, best_s) if number else waited_s

    def _beyond(self, sample_id: str, tool: str, waited_s: float) -> tuple[list[float], list[float], int]:
        """Returns the gaps that count for a sample, their sums, and the first bin of those longer than `waited_s`."""
        gaps, sums = [0.0] * BINS, [0.0] * BINS
        self._all.add_to(gaps, sums, ALL_GAPS)
        if tool in self._tools:
            self._tools[tool].add_to(gaps, sums, TOOL_GAPS)
        if sample_id in self._own:
            self._own[sample_id].add_to(gaps, sums, None)
        return gaps, sums, _bin(waited_s) + 1 if waited_s else 0

    def learn(self, sample_id: str, tool: str, gap_s: float) -> None:
        self._all.add(gap_s)
        self._own.setdefault(sample_id, GapCounts()).add(gap_s)
        if tool in self._tools or len(self._tools) < MAX_TOOLS:
            self._tools.setdefault(tool, GapCounts()).add(gap_s)

    def follow(self, sample_id: str, of: str) -> None:
        """Lets a sample begin with the gaps of another one."""
        if of in self._own:
            self._own[sample_id] = self._own[of]

    def forget(self, sample_id: str) -> None:
        self._own.pop(sample_id, None)
