"""Updates from every rank of a trainer, by layout: two replicas decode, and ranks are processes of this machine.

Ranks publish through shared memory or over HTTP, the latter optionally over a link that carries few bytes a second. The
layouts run one after the other, each with new rank processes. The first update of each layout is not counted.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import LOOPBACK_ONLY, service
from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.app.gateway.gateway_config import GatewayApplication
from tailrace.app.model import resolve_model
from tailrace.deployments.messages.roles import Role
from tailrace.kvpool.programs import free_port
from tailrace.lab.benchmarks.http import servers
from tailrace.lab.benchmarks.live.decoding_load import DecodingLoad
from tailrace.lab.benchmarks.live.rank_process import HTTP, LAYOUTS, RANK_PROGRAM, rank_jobs
from tailrace.lab.benchmarks.live.slow_link import SlowLink
from tailrace.lab.verification.services import own_gateway


@dataclass(frozen=True)
class RanksBench:
    """The benchmark. `repeats`: counted updates of each layout. `samples`: number of samples that decode meanwhile.

    `link_mbit`: Mbit/s of the link of ranks that publish over HTTP; None: no limit. `link_ms`: milliseconds there and
    back over the link. With None and 0 the ranks reach the gateway directly.
    """

    layouts: Sequence[str]
    repeats: int
    samples: int
    link_mbit: float | None
    link_ms: float
    say: Callable[[str], None]

    def measure(self, file: ServeFile) -> dict:
        """Returns medians by layout, and every update. Seconds begin when all ranks are told to publish."""
        model = resolve_model(file.application.args.engine.model)
        with TemporaryDirectory(prefix="tailrace-ranks-") as folder:
            gateway, trainer = _with_trainer(file, Path(folder) / "tokens")
            with service(file.model_copy(update={"applications": (file.application, gateway)}), None) as client:
                servers.await_health(f"http://{trainer.rpartition('@')[2]}")
                mbit, delay_s = self.link_mbit or float("inf"), self.link_ms / 2000
                with SlowLink(urlsplit(trainer).port, mbit, delay_s) as link:
                    if self.link_mbit or self.link_ms:
                        trainer = f"{trainer.rpartition('@')[0]}@{link.address}"
                    return asyncio.run(self._measured(client, model, trainer, link))

    async def _measured(self, client: RolloutClient, model: Path, trainer: str, link: SlowLink) -> dict:
        import ray

        cluster = ray.get_runtime_context().gcs_address
        load = DecodingLoad(client, self.samples)

        async def measured() -> dict:
            found = {}
            for layout in self.layouts:
                first = (await client.status()).weights_version + 1
                versions = tuple(range(first, first + self.repeats + 1))
                ranks = ranks_here(model, layout, versions, trainer if HTTP in layout else cluster)
                rows = await self._updates(load, ranks, versions, link)
                found[layout] = _medians(rows[1:]) | {"ranks": LAYOUTS[layout], "bytes": _bytes_of(model)}
                self.say(f"{layout}: {found[layout]}")
            return found

        return await load.beside(measured())

    async def _updates(
        self, load: DecodingLoad, ranks: "RankProcesses", versions: tuple[int, ...], link: SlowLink
    ) -> list[list[dict]]:
        """Publishes all versions. Returns the rows of all ranks, a list for each version. Raises Failed if the service
        refuses a version.
        """
        with ranks:
            rows = []
            for version in versions:
                await load.busy(version - 1, replicas=1)  # one replica may run all samples
                before = link.carried
                rows.append(await asyncio.to_thread(ranks.publish))
                if refused := next((row["refused"] for row in rows[-1] if "refused" in row), None):
                    raise Failed(f"version {version} was refused: {refused}")
                rows[-1][0]["carried"] = link.carried - before
                self.say(f"version {version}: {rows[-1]}")
            return rows


def _with_trainer(file: ServeFile, tokens: Path) -> tuple[GatewayApplication, str]:
    """Returns a gateway for this machine and one trainer, and the address by which the trainer reaches the gateway.

    Writes the trainer's token to the file `tokens`.
    """
    token = secrets.token_hex(16)
    tokens.write_text(f"{Role.TRAINER} {token}\n")
    gateway = own_gateway(file, str(tokens))
    return gateway, f"http://{Role.TRAINER}:{token}@{gateway.args.host}:{gateway.args.port}"


class RankProcesses:
    """The processes of the ranks of one layout. `commands`: the command of each rank, see `rank_process`."""

    def __init__(self, commands: Iterable[Sequence[str]], environment: Mapping[str, str] = os.environ):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [subprocess.Popen(command, env=environment, **pipes) for command in commands]

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def publish(self) -> list[dict]:
        """Has all ranks publish the next version. Returns their rows. Raises Failed if a rank has ended."""
        for process in self.processes:
            self.line(process)  # "ready"
        for process in self.processes:
            self.tell(process)
        return [json.loads(self.line(process)) for process in self.processes]

    def line(self, process: subprocess.Popen) -> str:
        """Returns the next line of a rank. Raises Failed if the rank has ended."""
        if not (line := process.stdout.readline()):
            raise Failed(f"a rank has ended: {process.args[-1]}")
        return line.strip()

    def tell(self, process: subprocess.Popen) -> None:
        """Tells one rank to publish."""
        process.stdin.write("\n")
        process.stdin.flush()


def ranks_here(
    model: Path, layout: str, versions: tuple[int, ...], address: str, timeout_s: float = 60.0
) -> RankProcesses:
    """Starts the ranks of a layout as processes of this machine. `versions`: versions to publish. `address`: address of
    the cluster or the gateway. `timeout_s`: maximum seconds that the ranks wait for one another.
    """
    master = f"127.0.0.1:{free_port('127.0.0.1')}"
    jobs = rank_jobs(master, address=address, model=str(model), layout=layout, versions=versions, timeout_s=timeout_s)
    commands = [(sys.executable, "-m", RANK_PROGRAM, job.text()) for job in jobs]
    return RankProcesses(commands, os.environ | LOOPBACK_ONLY)


def _bytes_of(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _medians(updates: list[list[dict]]) -> dict:
    """Returns medians over the updates, and all updates. An update takes as long as its slowest rank."""
    paused = [value for ranks in updates for value in ranks[0]["paused_s"]]
    carried = median(ranks[0]["carried"] for ranks in updates)
    found = {key: median(max(rank[key] for rank in ranks) for ranks in updates) for key in ("update_s", "blocked_s")}
    return {key: round(value, 3) for key, value in (found | {"paused_s": median(paused)}).items()} | {
        "link_bytes": carried,
        "updates": [{key: round(max(rank[key] for rank in ranks), 3) for key in found} for ranks in updates],
    }
