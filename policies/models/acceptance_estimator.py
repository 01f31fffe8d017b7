"""Draft tokens that were tested, and the right ones of them, by draft method: faded sums.

What "tested" means, the fade and the prior are in `policies.protocol.performance`. Owned by `PerformanceEstimator`, and
by a modelled replica of the simulator.
"""

from tailrace.policies.protocol.performance import FADE, PRIOR, MethodAcceptance, chance

HALF_S = 300.0
"""Seconds without a test after which a method's counts weigh half, and again half after as many more. A policy that
does not draft because few drafts were right gets no tests: without this it would never draft again.
"""


class AcceptanceEstimator:
    def __init__(self):
        self._sums: dict[str, list[float]] = {}  # by method: right, tested, time of the last

    def count(self, method: str, right: float, tested: float, now_s: float = 0.0, verifications: int = 1) -> None:
        """Records the tested draft tokens of some verifications."""
        sums = self._sums.get(method)
        if sums is None:
            self._sums[method] = [float(right), float(tested), now_s]
            return
        fade = FADE**verifications * _weight(sums, now_s)
        sums[0] = fade * sums[0] + right
        sums[1] = fade * sums[1] + tested
        sums[2] = now_s

    def chance(self, method: str, prior: float = PRIOR) -> float:
        """Returns the chance that a draft token of the method is right if all before it are."""
        right, tested, _ = self._sums.get(method, (0.0, 0.0, 0.0))
        return chance(right, tested, prior)

    def overall(self, now_s: float = 0.0) -> float:
        """Returns the same over all methods, by their age at `now_s`."""
        sums = [(one, _weight(one, now_s)) for one in self._sums.values()]
        return chance(sum(one[0] * weight for one, weight in sums), sum(one[1] * weight for one, weight in sums))

    def report(self, now_s: float = 0.0) -> tuple[MethodAcceptance, ...]:
        """Returns the sums by method, in order of names, by their age at `now_s`."""
        weights = {method: _weight(sums, now_s) for method, sums in self._sums.items()}
        return tuple(
            MethodAcceptance(method, right * weights[method], tested * weights[method], max(0.0, now_s - last_s))
            for method, (right, tested, last_s) in sorted(self._sums.items())
        )


def _weight(sums: list[float], now_s: float) -> float:
    """Returns the weight of sums at `now_s`, which is below 1 once the last test was HALF_S ago."""
    return 0.5 ** max(0.0, (now_s - sums[2]) // HALF_S)
