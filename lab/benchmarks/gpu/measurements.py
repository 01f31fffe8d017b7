"""The measurements of one step: each is tried, and what it gives, or its error, is written at once."""

import time
import traceback
from collections.abc import Callable

from tailrace.lab.benchmarks.gpu.place import Place
from tailrace.lab.benchmarks.gpu.result_lines import ResultLines

NEEDS_CARD = "needs a card"


class StepEnds(Exception):
    """A measurement failed that all others of the step need."""


class Measurements:
    """`failed`: how many have raised."""

    def __init__(self, step: str, place: Place):
        self.step, self.place, self.failed = step, place, 0
        self._results = ResultLines(place.out)

    def say(self, what: str, **figures) -> None:
        """Writes figures that took no time of their own."""
        self._results.add(self.step, what=what, **figures)

    def tried(self, what: str, run: Callable[[], dict]) -> bool:
        """Writes what `run` gives, or its error. Returns whether it gave something."""
        began_s = time.perf_counter()
        try:
            found = run()
        except Exception as error:  # noqa: BLE001 - the edge of a measurement: it costs itself alone
            traceback.print_exc()
            self.failed += 1
            text = f"{type(error).__name__}: {str(error)[:500]}"
            self._results.add(self.step, what=what, s=self._since(began_s), error=text)
            return False
        self._results.add(self.step, what=what, s=self._since(began_s), **found)
        return True

    def must(self, what: str, run: Callable[[], dict]) -> None:
        """As `tried`, for a measurement that all others of the step need. Raises StepEnds."""
        if not self.tried(what, run):
            raise StepEnds(what)

    def on_card(self, what: str, run: Callable[[], dict]) -> bool:
        """As `tried`, for a measurement that says nothing, or does not run, without a GPU."""
        if self.place.card:
            return self.tried(what, run)
        self.say(what, skipped=NEEDS_CARD)
        return True

    @staticmethod
    def _since(began_s: float) -> float:
        return round(time.perf_counter() - began_s, 2)
