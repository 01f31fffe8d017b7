"""Which global step of the trainer each weights version of the service has.

Invariant: versions are recorded in rising order. Owned by the server.
"""

from bisect import bisect_right


class GlobalSteps:
    def __init__(self) -> None:
        self._versions: list[int] = []
        self._steps: list[int] = []

    def record(self, version: int, step: int | None) -> None:
        """The service has `version` now. Without a step it is the last one's, since verl then sends the same again."""
        last = self._steps[-1] if self._steps else 0
        self._versions.append(version)
        self._steps.append(last if step is None else step)

    def of(self, version: int) -> int:
        """The global step of the newest known version up to `version`; 0 for weights older than this run's first."""
        place = bisect_right(self._versions, version)
        return self._steps[place - 1] if place else 0
