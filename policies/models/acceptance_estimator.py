"""Draft tokens that were tested, and the right ones of them, by draft method: faded sums.

What "tested" means, the fade and the prior are in `policies.protocol.performance`. Owned by `PerformanceEstimator`, and
by a modelled replica of the simulator.
"""

from tailrace.policies.protocol.performance import FADE, PRIOR, MethodAcceptance, chance


class AcceptanceEstimator:
    def __init__(self):
        self._sums: dict[str, list[float]] = {}  # by method: right, tested, time of the last

    def count(self, method: str, right: float, tested: float, now_s: float = 0.0, verifications: int = 1) -> None:
        """Records the tested draft tokens of some verifications."""
        sums = self._sums.get(method)
        if sums is None:
            self._sums[method] = [float(right), float(tested), now_s]
            return
        fade = FADE**verifications
        sums[0] = fade * sums[0] + right
        sums[1] = fade * sums[1] + tested
        sums[2] = now_s

    def chance(self, method: str, prior: float = PRIOR) -> float:
        """Returns the chance that a draft token of the method is right if all before it are."""
        right, tested, _ = self._sums.get(method, (0.0, 0.0, 0.0))
        return chance(right, tested, prior)

    def overall(self) -> float:
        """Returns the same over all methods."""
        sums = self._sums.values()
        return chance(sum(one[0] for one in sums), sum(one[1] for one in sums))

    def report(self, now_s: float = 0.0) -> tuple[MethodAcceptance, ...]:
        """Returns the sums by method, in order of names."""
        return tuple(
            MethodAcceptance(method=method, right=right, tested=tested, age_s=max(0.0, now_s - last_s))
            for method, (right, tested, last_s) in sorted(self._sums.items())
        )
