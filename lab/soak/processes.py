"""Processes of a soak, from /proc: all that descend from this one, with their role, memory and open files.

Called by lab/soak/run.py and by lab/soak/faults.py.
"""

import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
DRIVER = "tailrace.lab.soak.driver"


@dataclass(frozen=True, slots=True)
class Reading:
    """One process at one moment. `born`: clock ticks since the machine's start; a process id may come again."""

    pid: int
    born: int
    role: str
    rss_bytes: int
    files: int


def role_of(arguments: list[str]) -> str:
    """Returns the role of a process by its command line: `Engine`, `MasterActor`, `raylet`, `driver trainer`, ..."""
    name = arguments[0]
    if name.startswith("ray::"):  # ray::ServeReplica:tailrace:Engine.method, ray::ShardActor.method, ray::IDLE
        role, _, method = name.split(":")[-1].partition(".")
        return f"{role} (starts)" if method.startswith("initialize") else role
    if DRIVER in arguments:
        return f"driver {Path(arguments[arguments.index(DRIVER) + 1]).stem}"
    modules = [Path(argument).stem for argument in arguments[1:] if argument.endswith(".py")]
    return modules[0] if modules and Path(name).name.startswith("python") else Path(name).name


def read_all() -> list[Reading]:
    """Returns this process as `soak`, and all that descend from it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if (fields := stat_of(int(folder.name))) is not None:
            parents[int(folder.name)] = int(fields[1])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return [reading for pid in sorted(ours) if (reading := _read(pid)) is not None]


def is_running(pid: int) -> bool:
    return stat_of(pid) is not None


def is_alive(pid: int, born: int) -> bool:
    """Returns whether this very process still runs."""
    fields = stat_of(pid)
    return fields is not None and int(fields[19]) == born


def _read(pid: int) -> Reading | None:
    folder = Path(f"/proc/{pid}")
    try:
        fields = stat_of(pid)
        arguments = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        pages = int((folder / "statm").read_text().split()[1])
        files = len(os.listdir(folder / "fd"))
    except OSError:  # it has ended since
        return None
    if fields is None or not arguments[0]:
        return None
    role = "soak" if pid == os.getpid() else role_of(arguments)
    return Reading(pid=pid, born=int(fields[19]), role=role, rss_bytes=pages * PAGE_BYTES, files=files)


def stat_of(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the third on, or None if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return fields if fields[0] not in "ZX" else None
