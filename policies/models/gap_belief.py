"""How long a trajectory pauses between two turns: its own earlier gaps, and those of all as a prior.

O(1) a gap. Called by `policies.core.trajectory_book`.
"""

PRIOR_S, PRIOR_GAPS = 10.0, 1.0
"""Seconds of a gap before any was seen, and the weight of the mean of all in gaps of the trajectory itself: coding
agents' tools take 9 s in the median, and a session's gaps resemble each other."""


class GapBelief:
    def __init__(self):
        self._sum_s, self._gaps = PRIOR_S * PRIOR_GAPS, PRIOR_GAPS
        self._own: dict[str, tuple[float, int]] = {}  # by sample id: sum of seconds, gaps

    def expected_s(self, sample_id: str) -> float:
        """Returns the expected seconds of the next gap of a sample."""
        own_s, own = self._own.get(sample_id, (0.0, 0))
        return (own_s + PRIOR_GAPS * self._sum_s / self._gaps) / (own + PRIOR_GAPS)

    def learn(self, sample_id: str, gap_s: float) -> None:
        own_s, own = self._own.get(sample_id, (0.0, 0))
        self._own[sample_id] = own_s + gap_s, own + 1
        self._sum_s += gap_s
        self._gaps += 1

    def follow(self, sample_id: str, of: str) -> None:
        """Lets a sample begin with the gaps of another one."""
        if of in self._own:
            self._own[sample_id] = self._own[of]

    def forget(self, sample_id: str) -> None:
        self._own.pop(sample_id, None)
