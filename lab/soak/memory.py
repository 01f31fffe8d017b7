"""Memory and open files of every process over a soak: at its start after warm-up, at the end, and the growth.

Called by lab/soak/run.py with the readings of lab/soak/processes.py.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from tailrace.lab.soak.processes import Reading

MB = 1e6
WARM_S = 180.0
"""Seconds of warm-up after the start of a process: engines fill their caches, Python its arenas. At most a quarter of
the soak.
"""

SLOPE_S = 120.0
"""Shortest stretch in seconds for a slope: growth within less is noise."""

Look = tuple[float, int, int]
"""Seconds since the start, RSS in bytes, open files."""


class ProcessLog:
    """Readings by process. A process that has ended keeps its own."""

    def __init__(self):
        self.looks: dict[tuple[int, int], list[Look]] = defaultdict(list)
        self.roles: dict[tuple[int, int], str] = {}
        self.alive: list[Reading] = []

    def add(self, at_s: float, readings: Sequence[Reading]) -> None:
        self.alive = list(readings)
        for one in readings:
            self.looks[one.pid, one.born].append((at_s, one.rss_bytes, one.files))
            self.roles[one.pid, one.born] = one.role  # a worker has its role once its actor is made

    def report(self, warm_s: float) -> dict:
        """Returns `processes`: those alive at the end, by role; `ended`: numbers of those that are not, by role."""
        alive = {(one.pid, one.born) for one in self.alive}
        rows = [self._row(key, warm_s) for key in self.looks if key in alive]
        ended = Counter(self.roles[key] for key in self.looks if key not in alive)
        return {
            "processes": sorted(rows, key=lambda row: (row["role"], row["pid"])),
            "ended": dict(sorted(ended.items())),
        }

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """Returns RSS in MB over seconds, of each process by role and process id."""
        return {
            f"{self.roles[key]} {key[0]}": [(round(at_s, 1), round(rss / MB, 1)) for at_s, rss, _ in looks]
            for key, looks in self.looks.items()
        }

    def _row(self, key: tuple[int, int], warm_s: float) -> dict:
        looks = self.looks[key]
        (born_s, *_), (end_s, rss, files) = looks[0], looks[-1]
        start = next((look for look in looks if look[0] >= born_s + warm_s), looks[-1])
        return {
            "role": self.roles[key],
            "pid": key[0],
            "lived_s": round(end_s - born_s, 1),
            "start_mb": round(start[1] / MB, 1),
            "end_mb": round(rss / MB, 1),
            "start_files": start[2],
            "end_files": files,
            "mb_per_hour": mb_per_hour([look for look in looks if look[0] >= max(end_s / 2, start[0])]),
        }


def mb_per_hour(looks: Sequence[Look]) -> float | None:
    """Returns the slope of the RSS by least squares, or None if the looks cover less than SLOPE_S."""
    if len(looks) < 3 or looks[-1][0] - looks[0][0] < SLOPE_S:
        return None
    seconds, rss, _ = np.array(looks, dtype=float).T
    return round(float(np.polyfit(seconds / 3600, rss / MB, 1)[0]), 1)
