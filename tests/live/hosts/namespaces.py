"""Hosts of a test: processes with network, process table, host name, home, /tmp and shared memory of their own.

Each has an address on one bridge of this machine and an ssh server there, as a rented machine has. The file system is
this machine's, except home, /tmp and /dev/shm. Home and /tmp outlast the host: one that was killed may start again.
Needs root, iproute2, openssh-server, rsync and nftables. Invariant: what was made here is removed by `close`.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

TOOLS = {"ip": "iproute2", "/usr/sbin/sshd": "openssh-server", "rsync": "rsync", "nft": "nftables"}
"""Programs by name, and their Debian packages."""

BRIDGE = "tailrace0"
SUBNET = "10.77.0"
MACHINE = f"{SUBNET}.1"

INIT = """
set -e
mount --make-rprivate /
for path in $SHARED; do  # stays visible below the private /tmp and home
  case $path in
    /tmp/*) place=$HOST/tmp/${path#/tmp/} ;;
    $HOME_OF_ROOT/*) place=$HOST/home/${path#$HOME_OF_ROOT/} ;;
    *) continue ;;
  esac
  mkdir -p $place
  mount --bind $path $place
  mount -o remount,bind,ro $place
done
mount --rbind $HOST/tmp /tmp
mount --rbind $HOST/home $HOME_OF_ROOT
mount -t tmpfs -o size=2g,mode=1777 tmpfs /dev/shm
mount --bind $HOST/hosts /etc/hosts
mkdir -p /run/sshd
mount -t tmpfs tmpfs /run/sshd
chmod 0755 /run/sshd
hostname $NAME
ip link set lo up
until ip -4 -o addr show dev eth0 2>/dev/null | grep -q inet; do sleep 0.05; done
/usr/sbin/sshd -f $HOST/sshd_config -E $HOST/sshd.log
while true; do sleep 1 & wait $!; done  # init: collects ended processes
"""


def missing() -> str | None:
    """The reason why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    packages = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    return f"needs packages: apt-get install -y --no-install-recommends {' '.join(packages)}" if packages else None


def run(*command: object, **options) -> str:
    """Output of a command. Raises RuntimeError with its error output if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{command} exits with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


class Host:
    """One host of a `Network`."""

    def __init__(self, network: "Network", name: str, number: int, cores: set[int], shared: list[Path]):
        """`cores`: that its processes may use. `shared`: folders below /tmp or home that it may read."""
        self.name, self.address = name, f"{SUBNET}.{number}"
        self._network, self._cores, self._shared = network, cores, shared
        self._folder = network.folder / name
        self._link = f"tr-{number}"
        self._init: subprocess.Popen | None = None
        for part in ("tmp", "home"):
            (self._folder / part).mkdir(parents=True)
        (self._folder / "tmp").chmod(0o1777)
        (self._folder / "sshd_config").write_text(
            f"ListenAddress {self.address}\nHostKey {network.key}\nAuthorizedKeysFile {network.key}.pub\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nStrictModes no\nUsePAM no\n"
            f"MaxStartups 100\nPidFile none\nSubsystem sftp internal-sftp\n"
        )

    def start(self) -> None:
        """Start the host, and return when its ssh server answers."""
        names = "".join(f"{host.address} {host.name}\n" for host in self._network.hosts.values())
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOST": str(self._folder),
            "NAME": self.name,
            "HOME_OF_ROOT": str(Path("~root").expanduser()),
            "SHARED": " ".join(map(str, self._shared)),
        }
        namespaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        dies_with_us, cores = ("setpriv", "--pdeathsig", "KILL"), ",".join(map(str, self._cores))
        self._init = subprocess.Popen(
            ("taskset", "--cpu-list", cores, *dies_with_us, "unshare", *namespaces, "bash", "-c", INIT),
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=(self._folder / "init.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        self._connect()
        deadline_s = time.monotonic() + 120.0
        while not self.answers():
            if time.monotonic() > deadline_s or self._init.poll() is not None:
                raise RuntimeError(f"host {self.name} did not start: {(self._folder / 'init.log').read_text()}")
            time.sleep(0.1)

    def _connect(self) -> None:
        deadline_s = time.monotonic() + 10.0
        here = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{self._init.pid}/ns/net") == here:  # it has not left this machine's network yet
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"host {self.name} has no network of its own")
            time.sleep(0.02)
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._init.pid)
        run("ip", "link", "set", self._link, "master", BRIDGE, "up")
        self.inside("ip", "link", "set", "eth0", "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("ip", "route", "add", "default", "via", MACHINE)

    def inside(self, *command: object) -> str:
        """Run a command of this machine in the host's network. Returns its output."""
        return run("nsenter", "--net", "--target", self._init.pid, *command)

    def ssh(self, command: str, timeout_s: float = 300.0) -> str:
        """Run a command line on the host, as a user would. Returns its output."""
        return run(*self.ssh_words(), command, timeout=timeout_s)

    def ssh_words(self) -> tuple[str, ...]:
        quiet = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
        soon = ("-o", "ConnectTimeout=3", "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3")
        return ("ssh", "-i", str(self._network.key), *quiet, *soon, f"root@{self.address}")

    def answers(self) -> bool:
        try:
            return self.ssh("echo here", timeout_s=10.0) == "here\n"
        except (RuntimeError, subprocess.TimeoutExpired):
            return False

    def process(self, title: str) -> str:
        """Ids of the host's processes whose command line contains `title`; empty if there is none."""
        return self.ssh(f"pgrep -f '[{title[0]}]{title[1:]}' || true").strip()

    def received_bytes(self) -> int:
        """Bytes from other hosts since it started."""
        return int(Path(f"/sys/class/net/{self._link}/statistics/tx_bytes").read_text())

    def path(self, name: str) -> Path:
        """A file of the host's home, as this machine sees it."""
        return self._folder / "home" / name

    def part(self) -> None:
        """Drop every packet between this host and the other hosts; this machine still reaches it."""
        rules = f"ip saddr {SUBNET}.0/24 ip saddr != {MACHINE} drop"
        rules_out = f"ip daddr {SUBNET}.0/24 ip daddr != {MACHINE} drop"
        self.inside("nft", "add table ip parted")
        self.inside("nft", "add chain ip parted in { type filter hook input priority 0; }")
        self.inside("nft", "add chain ip parted out { type filter hook output priority 0; }")
        self.inside("nft", f"add rule ip parted in ip saddr != {self.address} {rules}")
        self.inside("nft", f"add rule ip parted out ip daddr != {self.address} {rules_out}")

    def heal(self) -> None:
        self.inside("nft", "delete table ip parted")

    def kill(self) -> None:
        """End the host whole, as a power loss does: no packet of its processes' ends gets out."""
        if self._init is None:
            return
        if Path(f"/sys/class/net/{self._link}").exists():
            run("ip", "link", "delete", self._link)
        os.killpg(self._init.pid, signal.SIGKILL)  # the kernel ends the namespace's processes with its init
        self._init.wait()
        self._init = None


class Network:
    """Hosts on one bridge, and the ssh key for all of them."""

    def __init__(self, folder: Path):
        self.folder, self.key = folder, folder / "key"
        self.hosts: dict[str, Host] = {}
        folder.mkdir(parents=True, exist_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key)
        if Path(f"/sys/class/net/{BRIDGE}").exists():
            run("ip", "link", "delete", BRIDGE)  # of a run that was killed
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{MACHINE}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")

    def add(self, name: str, cores: set[int], shared: list[Path]) -> Host:
        self.hosts[name] = Host(self, name, 11 + len(self.hosts), cores, shared)
        return self.hosts[name]

    def close(self) -> None:
        for host in self.hosts.values():
            host.kill()
        run("ip", "link", "delete", BRIDGE)
