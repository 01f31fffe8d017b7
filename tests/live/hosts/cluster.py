"""A user's Ray cluster on hosts of this machine: its cluster file, and the commands of the README on its head."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from waiting import until

from hosts.namespaces import Host, Network
from tailrace.lab.benchmarks.live.rank_process import RANK_PROGRAM, rank_jobs
from tailrace.lab.benchmarks.live.ranks import RankProcesses

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = next(Path(entry) for entry in sys.path if entry.endswith("site-packages"))
PROGRAMS = Path(sys.executable).parent
TOKEN = "RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"

ENVIRONMENT = (
    f"cd ~/tailrace && {Path(sys.executable).resolve()} -m venv --without-pip .venv"
    f" && echo {PACKAGES} > $(echo .venv/lib/python3*/site-packages)/packages_of_the_machine.pth"
    " && for name in ray serve; do"
    f' sed "1s|.*|#!$HOME/tailrace/.venv/bin/python|" {PROGRAMS}/$name > .venv/bin/$name;'
    " chmod +x .venv/bin/$name; done"
    " && .venv/bin/python -m pip install -q --no-deps --no-build-isolation --ignore-installed ."
)
"""In place of `make setup`: the packages of this machine, and Tailrace itself installed on the host."""

SERVICE = {
    "engine": {"max_model_len": 1024, "max_running": 4, "kv_cache_gib": 0.5, "cores": 1},
    "pool": {"dram_gib": 1.0},
}
"""The pool holds the KV of a rollout, and the weights that the other host pulls."""

MASTER_PORT = 29400


class UserCluster:
    """What a user has: a cluster file, the hosts' addresses, and commands."""

    def __init__(self, head: Host, workers: list[Host], file: Path, environment: dict[str, str]):
        self.head, self.workers, self._file, self._environment = head, workers, file, environment

    def up(self) -> str:
        """`ray up`: returns when the head runs and every worker has joined."""
        command = (PROGRAMS / "ray", "up", "--yes", "--no-config-cache", self._file.name)
        done = subprocess.run(
            command,
            cwd=self._file.parent,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        self.await_nodes(1 + len(self.workers))
        return done.stdout

    def on_head(self, command: str, timeout_s: float = 600.0) -> str:
        return self.head.ssh(f"cd ~/tailrace && {TOKEN} {command}", timeout_s)

    def nodes(self) -> list[str]:
        """Addresses of the nodes that are alive, in order."""
        script = "import ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR'); "
        script += "print(*sorted(n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']))"
        try:
            return self.on_head(f'.venv/bin/python -c "{script}"').split()
        except RuntimeError:
            return []  # the head has not started

    def await_nodes(self, count: int, wait_s: float = 300.0) -> None:
        until(lambda: len(self.nodes()) == count, wait_s)

    def deploy(self) -> None:
        """`serve deploy`, and wait until the application runs."""
        self.on_head(".venv/bin/serve deploy hosts.yaml")
        self.await_application()

    def await_application(self, wait_s: float = 400.0) -> None:
        def state() -> str:
            found = yaml.safe_load(self.on_head(".venv/bin/serve status"))["applications"]["tailrace"]
            assert found["status"] != "DEPLOY_FAILED", found
            return found["status"]

        until(lambda: state() == "RUNNING", wait_s)

    def publish(self, hosts: list[Host], model: Path, layout: str, version: int) -> list[dict]:
        """Has the ranks of a trainer publish a version, each from a host of its own. Returns their rows."""
        shared = {"address": "auto", "model": str(model), "versions": (version,), "timeout_s": 300.0}
        jobs = rank_jobs(f"{hosts[0].address}:{MASTER_PORT}", layout, **shared)
        program = f"cd ~/tailrace && {TOKEN} .venv/bin/python -m {RANK_PROGRAM}"
        commands = [
            (*host.ssh_words(), f"{program} {shlex.quote(job.text())}") for host, job in zip(hosts, jobs, strict=True)
        ]
        with RankProcesses(commands) as ranks:
            return ranks.publish()

    def asked(self, call: str) -> dict:
        """Returns the answer to a call of a client on the head."""
        script = "import sys, tailrace; out = sys.stdout; sys.stdout = sys.stderr; "
        script += f"print(tailrace.connect().{call}.model_dump_json(), file=out)"
        return json.loads(self.on_head(f".venv/bin/python -c {shlex.quote(script)}"))

    def rollout(self, name: str, prompts: str = "lab/demo/prompts.jsonl") -> subprocess.Popen:
        """Start `tailrace rollout` on the head; its groups go to ~/NAME.jsonl there."""
        command = (
            f"cd ~/tailrace && {TOKEN} .venv/bin/python -m tailrace rollout --address auto --config hosts.yaml"
            f" --prompts {prompts} --samples 4 --max-tokens 256 --out ~/{name}.jsonl --json"
        )
        return subprocess.Popen(
            (*self.head.ssh_words(), command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def machine_environment(folder: Path) -> dict[str, str]:
    """Of the user's commands on this machine: a home with the token, and a folder for the launcher's state."""
    home = folder / "user"
    home.mkdir(exist_ok=True)
    environment = os.environ | {"HOME": str(home), "RAY_TMPDIR": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run((PROGRAMS / "ray", "get-auth-token", "--generate"), env=environment, check=True, capture_output=True)
    return environment


def checkout(folder: Path) -> Path:
    """A fresh checkout of the user's: the launcher reads every file of it, .venv included."""
    left_out = shutil.ignore_patterns(".venv", ".git", "out", "__pycache__", ".hypothesis", ".*_cache", "*.egg-info")
    return shutil.copytree(ROOT, folder / "user" / "tailrace", symlinks=True, ignore=left_out)


def cluster_file(checkout: Path, network: Network) -> Path:
    """cluster.local.yaml with the hosts' addresses, their sizes, and packages that are there already."""
    head, *workers = network.hosts.values()
    values = yaml.safe_load((ROOT / "cluster.local.yaml").read_text())
    values["provider"] |= {"head_ip": head.address, "worker_ips": [host.address for host in workers]}
    values["auth"] = {"ssh_user": "root", "ssh_private_key": str(network.key)}
    values["setup_commands"] = [
        line.replace("cd ~/tailrace && make setup", ENVIRONMENT) for line in values["setup_commands"]
    ]
    for key, cpus in (("head_start_ray_commands", 0), ("worker_start_ray_commands", 2)):
        sizes = f"ray start --num-cpus={cpus} --object-store-memory=200000000"
        values[key] = [line.replace("ray start", sizes) for line in values[key]]
    file = checkout / "cluster.hosts.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def write_service(head: Host, model: Path) -> None:
    """serve.yaml in small: an engine on each worker, and the coordinator on one of them."""
    values = yaml.safe_load((ROOT / "serve.yaml").read_text())
    arguments = values["applications"][0]["args"]
    arguments["engine"] |= SERVICE["engine"] | {"model": str(model)}
    arguments["pool"] |= SERVICE["pool"]
    (coordinator,) = deployments = values["applications"][0]["deployments"]
    coordinator["ray_actor_options"] = {"num_cpus": 0.1}
    deployments.append({"name": "Engine", "ray_actor_options": {"num_cpus": 1.5}})
    head.path("tailrace/hosts.yaml").write_text(yaml.safe_dump(values))
