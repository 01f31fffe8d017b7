"""Every listening socket of a service is in the table of docs/ports.md, and none is open wider than it says."""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from waiting import until

from tailrace.app.cluster import service
from tailrace.app.config import ServeFile

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ports.md"
ROLES = {
    r"gcs_server": "gcs",
    r"raylet": "raylet",
    r"dashboard\.py": "dashboard",
    r"monitor\.py": "autoscaler",
    r"ray::DashboardAgent": "dashboard agent",
    r"ray::RuntimeEnvAgent": "runtime env agent",
    r"ray::IDLE": "idle worker",
    r"ray::ServeController": "serve controller",
    r"ray::ServeReplica:\w+:Coordinator": "coordinator",
    r"ray::ServeReplica:\w+:Engine": "engine",
    r"ray::ServeReplica:\w+:Drafter": "drafter",
    r"ray::ShardActor": "context shard",
    r"ray::MasterActor": "pool master actor",
    r"ray::StoreActor": "store actor",
    r"mooncake_master": "mooncake_master",
    r"mooncake_client": "mooncake_client",
}
"""The words of the table, by the program's name or the script's, or the title that Ray gives its process."""

ANYWHERE = {"0.0.0.0", "::", "*"}


class Sockets(NamedTuple):
    """Numbers of listening sockets of one process."""

    on_node: int
    on_all: int


def role_of(process: psutil.Process) -> str:
    words = [Path(word).name for word in process.cmdline()[:4] if not word.startswith("-")]
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


def documented() -> dict[str, tuple[str, int]]:
    """By role: the words for the number of sockets on the node's address, and the number on all interfaces."""
    table = re.search(r"<!-- ports: begin -->\n(.*?)<!-- ports: end -->", PAGE.read_text(), re.DOTALL)[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: (row[1], int(row[2])) for row in rows}


@pytest.fixture(scope="module")
def before() -> set[tuple[int, str, int]]:
    return open_sockets()


@pytest.fixture(scope="module")
def driver(tiny_model, before):
    engine = {"model": str(tiny_model), "max_model_len": 256, "max_running": 4, "kv_cache_gib": 0.25}
    drafter = {"model": str(tiny_model), "window": 4}
    arguments = {"engine": engine, "drafter": drafter, "pool": {"dram_gib": 0.25}}
    with service(ServeFile(applications=({"args": arguments | {"replicas": 1}},)), None) as client:
        until(lambda: [one for one in client.status_blocking().replicas if one.ready])
        yield psutil.Process()


def test_the_sockets_are_those_of_the_table(driver, before):
    table = documented()
    found = listening(driver, before)
    print(*(f"{role:20} {sorted(numbers)}" for role, numbers in sorted(found.items())), sep="\n")
    assert set(found) | {"idle worker"} == set(table), "a worker may be busy, or none idle"
    for role, counts in found.items():
        on_node, on_all = table[role]
        assert {one.on_all for one in counts} == {on_all}, f"{role} on all interfaces: {counts}"
        if on_node != "several":
            assert {one.on_node for one in counts} == {int(on_node)}, f"{role} on the node's address: {counts}"


def test_both_ways_of_looking_agree(driver):
    if not shutil.which("ss"):
        pytest.skip("ss is not installed; psutil was asked")
    ours = {one.pid for one in (driver, *driver.children(recursive=True)) if not role_of(one).startswith("idle")}

    def seen(found: list[tuple[int, str, int]]) -> list[tuple[int, bool, int]]:
        return sorted((pid, host in ANYWHERE, port) for pid, host, port in found if pid in ours)

    assert seen(by_ss()) == seen(by_psutil())
