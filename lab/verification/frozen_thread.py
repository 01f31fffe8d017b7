"""One thread of another process, stopped while the rest of the process runs: a step of an engine that never ends.

By ptrace(2), which needs root or CAP_SYS_PTRACE. The thread stays stopped until the caller's own thread ends, or until
the process is killed. Called by lab/verification/disturbances.py.
"""

import ctypes
import os
import time
from pathlib import Path

import psutil

SEIZE, INTERRUPT = 0x4206, 0x4207
"""Requests of ptrace(2), from <sys/ptrace.h>."""

SAMPLE_S = 0.5
"""An engine that decodes is busy for all of it."""


def processes_titled(part: str) -> list[int]:
    """Returns the ids of the Ray workers that descend from this process, as those of a local cluster do, with this in
    their title: the deployment's name for a replica of Serve. Other services of the machine are left alone.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended since
            continue
        if title.startswith("ray::") and part in title:
            found.append(process.pid)
    return sorted(found)


def busiest_thread(pid: int) -> tuple[int, int, int]:
    """Returns (process, thread, clock ticks within SAMPLE_S) of the thread that uses most of the CPU."""
    before = _ticks(pid)
    time.sleep(SAMPLE_S)
    used = {thread: ticks - before.get(thread, ticks) for thread, ticks in _ticks(pid).items()}
    thread = max(used, key=used.get)
    return pid, thread, used[thread]


def busiest_of(pids: list[int]) -> tuple[int, int, int]:
    """Returns `busiest_thread` of the process whose busiest thread uses most of the CPU."""
    return max(map(busiest_thread, pids), key=lambda found: found[2])


def freeze(thread: int) -> None:
    """Stops a thread. Raises OSError where the system does not permit it."""
    libc = ctypes.CDLL(None, use_errno=True)
    for request in (SEIZE, INTERRUPT):
        if libc.ptrace(request, thread, None, None) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot stop thread {thread} by ptrace: {os.strerror(number)}")


def _ticks(pid: int) -> dict[int, int]:
    """Returns the CPU time of each thread, in clock ticks: fields 14 and 15 of /proc/PID/task/TID/stat."""
    ticks = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        except OSError:  # the thread has ended since
            continue
        ticks[int(folder.name)] = int(fields[11]) + int(fields[12])
    return ticks
