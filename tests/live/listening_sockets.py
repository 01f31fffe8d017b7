"""Listening sockets of a service by the role of their process, and the table of docs/ports.md. Used by live tests."""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ports.md"
ROLES = {
    r"gcs_server": "gcs",
    r"raylet": "raylet",
    r"dashboard\.py": "dashboard",
    r"monitor\.py": "autoscaler",
    r"ray::DashboardAgent": "dashboard agent",
    r"ray::RuntimeEnvAgent": "runtime env agent",
    r"ray::IDLE": "idle worker",
    r"default_worker\.py": "idle worker",  # one that starts
    r"ray::ServeController": "serve controller",
    r"ray::ServeReplica:\w+:Coordinator": "coordinator",
    r"ray::ServeReplica:\w+:Engine": "engine",
    r"ray::ServeReplica:\w+:Drafter": "drafter",
    r"ray::ServeReplica:\w+:Gateway": "gateway",
    r"ray::ShardActor": "context shard",
    r"ray::MasterActor": "pool master actor",
    r"ray::StoreActor": "store actor",
    r"mooncake_master": "mooncake_master",
    r"mooncake_client": "mooncake_client",
}
"""The words of the table, by the program's name or the script's, or the title that Ray gives its process."""

ANYWHERE = {"0.0.0.0", "::", "*"}
FIXED_PORTS = {"dashboard agent": 52365, "autoscaler": 44217, "dashboard": 44227}
"""Those that Ray 2.60 gives to every cluster. Of two clusters on one machine the second one goes without."""


class Sockets(NamedTuple):
    """Numbers of listening sockets of one process."""

    on_node: int
    on_all: int


def role_of(process: psutil.Process) -> str:
    try:
        words = [Path(word).name for word in process.cmdline()[:4] if not word.startswith("-")]
    except psutil.NoSuchProcess:  # no others end while a service runs
        return "idle worker"
    for pattern, role in ROLES.items():
        if any(re.match(pattern, word) for word in words):
            return role
    return f"unknown: {' '.join(process.cmdline())[:200]}"


def by_ss() -> list[tuple[int, str, int]]:
    """Process id, address and port of each listening socket."""
    lines = subprocess.run(("ss", "-ltnpH"), capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for line in lines:
        host, _, port = line.split()[3].rpartition(":")
        address = host.strip("[]").partition("%")[0]
        found += [(int(pid), address, int(port)) for pid in set(re.findall(r"pid=(\d+)", line))]
    return found


def by_psutil() -> list[tuple[int, str, int]]:
    sockets = psutil.net_connections("tcp")
    return [(one.pid, *one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN and one.pid]


def open_sockets() -> set[tuple[int, str, int]]:
    return set(by_ss() if shutil.which("ss") else by_psutil())


def listening(driver: psutil.Process, before: set[tuple[int, str, int]]) -> dict[str, set[Sockets]]:
    """By role: the numbers of sockets of its processes, among the driver and all that it has started.

    `before` are those of other tests, which the driver's process had open before the service started.
    """
    processes = {one.pid: one for one in driver.children(recursive=True)}
    addresses = defaultdict(list)
    sockets = open_sockets()
    for pid, host, _ in sockets - before:
        if pid == driver.pid or pid in processes:
            addresses[pid].append(host.removeprefix("::ffff:"))
    found = defaultdict(set)
    for pid, hosts in addresses.items():
        wide = sum(host in ANYWHERE for host in hosts)
        role = "driver" if pid == driver.pid else role_of(processes[pid])
        assert {*hosts} - ANYWHERE == {"127.0.0.1"}, f"{role} on {hosts}"
        found[role].add(Sockets(len(hosts) - wide, wide))
    return dict(found)


def without_port(driver: psutil.Process) -> set[str]:
    """Returns the roles whose processes have not the port of FIXED_PORTS: another cluster's have it."""
    ours = {driver.pid, *(one.pid for one in driver.children(recursive=True))}
    have = {port for pid, _, port in open_sockets() if pid in ours}
    return {role for role, port in FIXED_PORTS.items() if port not in have}


def documented() -> dict[str, tuple[str, int]]:
    """By role: the words for the number of sockets on the node's address, and the number on all interfaces."""
    table = re.search(r"<!-- ports: begin -->\n(.*?)<!-- ports: end -->", PAGE.read_text(), re.DOTALL)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: (row[1], int(row[2])) for row in rows}
