"""A clock that a busy machine does not hurry: wall seconds, but at most the processor seconds of the process."""

import os
import time
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Returns the processor seconds of this process, all its threads together."""
    return time.process_time()


def cpu_s_of(pid: int) -> float:
    """Returns the processor seconds of another process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


class Since:
    """Time since an event. `pid`: the process that works meanwhile, or None for this one."""

    def __init__(self, pid: int | None = None):
        self._pid = pid
        self._wall_s, self._cpu_s = time.monotonic(), self._cpu()

    def _cpu(self) -> float:
        return own_cpu_s() if self._pid is None else cpu_s_of(self._pid)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._wall_s

    @property
    def fair_s(self) -> float:
        return min(self.wall_s, self._cpu() - self._cpu_s)
