"""The firewall lines of docs/ports.md, run as they stand there, in a network namespace of this test."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ports.md"
PORT, BELOW = 15900, 9000
"""One of Mooncake's ports, and one that the lines leave open."""

ADDRESSES = {"outside": ("10.78.0.1", "fd78::1"), "inside": ("10.78.0.2", "fd78::2")}

LISTEN = f"""
import socket, socketserver, threading

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        self.request.sendall(self.request.recv(4))

class Server(socketserver.ThreadingTCPServer):
    address_family, daemon_threads = socket.AF_INET6, True

for port in ({PORT}, {BELOW}):
    threading.Thread(target=Server(("::", port), Echo).serve_forever, daemon=True).start()
print("ready", flush=True)
input()
"""

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3.0).close()
except TimeoutError:
    sys.exit(3)
"""

KEEP = f"""
import socket
held = socket.create_connection(("10.78.0.2", {PORT}))
print("ready", flush=True)
input()
held.sendall(b"more")
print(held.recv(4).decode(), flush=True)
"""


def missing() -> str | None:
    """The reason why the lines cannot be run here, or None."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    packages = {"ip": "iproute2", "nft": "nftables"}
    wanted = [package for tool, package in packages.items() if not shutil.which(tool)]
    return f"needs packages: apt-get install -y {' '.join(wanted)}" if wanted else None


pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


class Place:
    """A network namespace, by its name."""

    def __init__(self, name: str):
        self.name = name

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(("ip", "netns", "exec", self.name, *command), capture_output=True, text=True, check=False)

    def set_up(self, *command: str) -> None:
        done = self.run(*command)
        assert not done.returncode, f"{command}: {done.stderr}"

    def start(self, program: str) -> subprocess.Popen:
        """Start a program, and return once it has said that it is ready."""
        words = ("ip", "netns", "exec", self.name, sys.executable, "-c", program)
        started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert started.stdout.readline() == "ready\n"
        return started

    def reaches(self, address: str, port: int) -> bool:
        """Whether a connection is taken. A dropped one gets no answer at all."""
        done = self.run(sys.executable, "-c", CONNECT, address, str(port))
        assert done.returncode in (0, 3), done.stderr
        return done.returncode == 0


@pytest.fixture
def places() -> Iterator[tuple[Place, Place]]:
    """Outside and inside, joined by a cable; a service listens inside."""
    outside, inside = (Place(f"tailrace-{side}-{os.getpid()}") for side in ADDRESSES)
    made, services = [], []
    try:
        for place in (outside, inside):
            subprocess.run(("ip", "netns", "add", place.name), check=True)
            made.append(place)
        cable = ("ip", "link", "add", "eth0", "netns", outside.name)
        subprocess.run((*cable, "type", "veth", "peer", "name", "eth0", "netns", inside.name), check=True)
        for place, (v4, v6) in zip((outside, inside), ADDRESSES.values(), strict=True):
            place.set_up("ip", "link", "set", "lo", "up")
            place.set_up("ip", "addr", "add", f"{v4}/24", "dev", "eth0")
            place.set_up("ip", "-6", "addr", "add", f"{v6}/64", "dev", "eth0", "nodad")
            place.set_up("ip", "link", "set", "eth0", "up")
        services += [place.start(LISTEN) for place in made]
        yield outside, inside
    finally:
        for service in services:
            service.kill()
            service.wait()
        for place in made:
            subprocess.run(("ip", "netns", "delete", place.name), check=False)


def blocks() -> list[list[str]]:
    """The commands of the page's blocks: of one machine, and the line that a cluster adds before the last."""
    found = re.findall(r"```\n(nft .*?)```", PAGE.read_text(), re.DOTALL)
    return [block.splitlines() for block in found]


def test_the_documented_lines_close_the_ports_from_outside_alone(places):
    outside, inside = places
    there = ADDRESSES["inside"]
    assert all(outside.reaches(address, PORT) for address in there), "else the lines are not what closes them"
    held = outside.start(KEEP)
    for line in blocks()[0]:
        inside.set_up("bash", "-c", line)
    assert not any(outside.reaches(address, PORT) for address in there)
    assert all(inside.reaches(address, PORT) for address in ("127.0.0.1", "::1", *there)), "the service reaches itself"
    assert outside.reaches(there[0], BELOW), "ports below are open, as ssh's"
    assert all(inside.reaches(address, PORT) for address in ADDRESSES["outside"]), "answers from outside come in"
    assert held.communicate("\n", timeout=60)[0] == "more\n", "a connection from before goes on"


def test_a_cluster_admits_its_own_nodes_and_itself(places):
    outside, inside = places
    first, (admit,) = blocks()
    assert "10.0.0.0/24" in admit
    for line in (*first[:-1], admit.replace("10.0.0.0/24", "10.78.0.0/24"), first[-1]):
        inside.set_up("bash", "-c", line)
    v4, v6 = ADDRESSES["inside"]
    assert outside.reaches(v4, PORT) and not outside.reaches(v6, PORT), "its other address is not of the subnet"
    assert all(inside.reaches(address, PORT) for address in ("127.0.0.1", "::1"))
