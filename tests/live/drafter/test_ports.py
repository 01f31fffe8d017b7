"""Every listening socket of a service is in the table of docs/ports.md, and none is open wider than it says."""

import shutil

import psutil
import pytest
from listening_sockets import ANYWHERE, by_psutil, by_ss, documented, listening, role_of, without_port
from waiting import until


@pytest.fixture(scope="module")
def driver(client):
    until(lambda: [one for one in client.status_blocking().replicas if one.ready])
    return psutil.Process()


def test_the_sockets_are_those_of_the_table(driver, before):
    table, lost = documented(), without_port(driver)
    found = listening(driver, before)
    print(*(f"{role:20} {sorted(numbers)}" for role, numbers in sorted(found.items())), sep="\n")
    assert set(found) | {"idle worker"} | lost == set(table), "a worker may be busy, or none idle"
    for role, counts in found.items():
        on_node, on_all = table[role]
        assert {one.on_all for one in counts} == {on_all}, f"{role} on all interfaces: {counts}"
        if on_node != "several":
            expected = int(on_node) - (role in lost)
            assert {one.on_node for one in counts} == {expected}, f"{role} on the node's address: {counts}"


def test_both_ways_of_looking_agree(driver):
    if not shutil.which("ss"):
        pytest.skip("ss is not installed; psutil was asked")
    ours = {one.pid for one in (driver, *driver.children(recursive=True)) if not role_of(one).startswith("idle")}

    def seen(found: list[tuple[int, str, int]]) -> list[tuple[int, bool, int]]:
        return sorted((pid, host in ANYWHERE, port) for pid, host, port in found if pid in ours)

    assert seen(by_ss()) == seen(by_psutil())
