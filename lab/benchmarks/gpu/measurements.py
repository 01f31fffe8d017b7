"""The measurements of one step. Each is run, and its figures or its error are written at once."""

import time
import traceback
from collections.abc import Callable

from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.result_lines import ResultLines
from tailrace.policies.protocol.exactness import Exactness

NEEDS_CARD = "needs a card"

MUST_BE = {
    "unlike": 0, "tokens_differ": 0, "held_unlike": 0, "changed": True, "returned": True, "same": True,
    "same_tokens": True, "same_as_by_folder": True,
}  # fmt: skip
"""Values of figures about tokens and bytes that must be the same, or after new weights must not. `law` allows others.
"""


class StepEnds(Exception):
    """The failure of a measurement that all others of the step need."""


class Measurements:
    """`failed`: number of measurements that raised an error. `unlike`: names of those with a figure that is not as in
    MUST_BE, at exactness `bits`.
    """

    def __init__(self, step: str, place: Place, level: Exactness = "bits"):
        self.step, self.place, self.failed = step, place, 0
        self.unlike: list[str] = []
        self._must_be = MUST_BE if level == "bits" else {}
        self._results = ResultLines(place.out)

    def say(self, what: str, **figures) -> None:
        """Writes figures that are known without a timed measurement."""
        self._results.add(self.step, what=what, **figures)

    def tried(self, what: str, run: Callable[[], dict]) -> bool:
        """Runs a measurement, and writes its figures or its error. Returns whether it succeeded."""
        began_s = time.perf_counter()
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 - a measurement that fails must not end the others
            traceback.print_exc()
            self.failed += 1
            text = f"{type(error).__name__}: {str(error)[:500]}"
            self._results.add(self.step, what=what, s=self._since(began_s), error=text)
            return False
        self._results.add(self.step, what=what, s=self._since(began_s), **found)
        if any(found.get(name, value) != value for name, value in self._must_be.items()):
            self.unlike.append(what)
        return True

    def must(self, what: str, run: Callable[[], dict]) -> None:
        """Runs a measurement that all others of the step need, like `tried`. Raises StepEnds if it fails."""
        if not self.tried(what, run):
            raise StepEnds(what)

    def on_card(self, what: str, run: Callable[[], dict]) -> bool:
        """Runs a measurement that needs a GPU, like `tried`. Without a GPU writes that it is skipped, and
        returns True.
        """
        if self.place.card:
            return self.tried(what, run)
        self.say(what, skipped=NEEDS_CARD)
        return True

    @staticmethod
    def _since(began_s: float) -> float:
        return round(time.perf_counter() - began_s, 2)
