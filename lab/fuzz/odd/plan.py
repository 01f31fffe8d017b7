"""The oddities of a run by seed: samples that no engine can run, broken engines, and drivers with odd requests.

Invariant: each kind is drawn from a stream of its own, so that no other choice of a seed depends on it.
"""

from dataclasses import dataclass
from random import Random

from tailrace.lab.fuzz.faults import Fault
from tailrace.lab.fuzz.odd.culprits import Culprits

ODDITIES = {
    "refused": 0.3,
    "raises": 0.3,
    "company": 0.05,
    "broken": 0.1,
    "hiccup": 0.1,
    "impossible": 0.3,
    "hasty": 0.3,
    "orders": 0.3,
}
"""Kinds, each with its share of seeds. For `impossible` (requests that no service can run) and `hasty` (calls that are
given up and made again at once) it is the share of drivers. `orders`: calls due at one instant run in an order by seed.
"""

SAMPLES_SHARES = 0.02, 0.2
"""Minimum and maximum share of samples that are refused, or that raise, in runs with such samples."""


@dataclass(frozen=True)
class OddPlan:
    """Oddities of a run. `refused`, `raising`: shares of samples. `company`: see `Culprits`. `faults`: faults of
    engines. `orders`: whether calls that are due at one instant run in any order."""

    refused: float = 0.0
    raising: float = 0.0
    company: bool = False
    faults: tuple[Fault, ...] = ()
    orders: bool = False

    def culprits(self) -> Culprits:
        return Culprits(self.refused, self.raising, self.company)


class Oddities:
    """Choices of a seed among these kinds."""

    def __init__(self, seed: int, kinds: tuple[str, ...]):
        self._seed, self._kinds = seed, kinds

    def chosen(self, kind: str, who: str = "") -> Random | None:
        """Returns the stream of a kind if the seed has it, for a driver of this name if one is given, else None."""
        rng = Random(f"{kind}/{self._seed}/{who}")
        return rng if rng.random() < ODDITIES[kind] and kind in self._kinds else None

    def plan(self, until_s: float) -> OddPlan:
        refused, raising, company = map(self.chosen, ("refused", "raises", "company"))
        faults: list[Fault] = []
        for kind in ("broken", "hiccup"):
            # a chunk that is alone in two steps that raise is to blame, so hiccups are one to a run without culprits
            rng = self.chosen(kind) if kind == "broken" or raising is company is None else None
            if rng is not None:
                faults.append(Fault(round(rng.uniform(0.5, until_s), 2), kind, rng.randrange(100), 0.0, 0))
        return OddPlan(
            refused=refused.uniform(*SAMPLES_SHARES) if refused else 0.0,
            raising=raising.uniform(*SAMPLES_SHARES) if raising else 0.0,
            company=company is not None,
            faults=tuple(faults),
            orders=self.chosen("orders") is not None,
        )


PLAIN = OddPlan()
