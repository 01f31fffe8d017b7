"""Share of a core that each process of a service takes, Tailrace's and Ray's, while replicas work and while they idle.

Measures processor time (user and system) of all processes that descend from this one, as the kernel counts it. Nothing
starts or ends in the measured window. Processor time is repeatable on a shared machine, tokens a second are not.
Engines are listed separately: they could have used the rest. Called by `tailrace bench processes`.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile, with_engine
from tailrace.app.files.prompts import read_prompts
from tailrace.app.model import resolve_model
from tailrace.deployments.messages.rollout import RolloutBatch
from tailrace.deployments.messages.sampling import SamplingParams
from tailrace.lab.benchmarks.http.servers import tiny_model
from tailrace.lab.benchmarks.live.heads import head
from tailrace.lab.demo import PROMPTS
from tailrace.lab.soak.processes import role_of, stat_of
from tailrace.lab.verification.tokens import whole

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
GROUPS, SAMPLES, TOKENS = 4, 8, 256
"""Size of a batch in groups, samples per group, and tokens per sample: its samples are as many as two replicas of
serve.yaml run at a time.
"""

BATCHES = 2
"""Number of batches in flight, so that replicas have work while a batch ends."""

WARM_S = 20.0
"""Seconds after which engines have measured their steps, and prompts are known."""

SETTLE_S = 10.0
"""Seconds to wait after the last batch, until its blocks are swept and its context has ended."""

ENGINES = "engine replica"
DRIVER = "driver"

NAMES = {
    "Engine": ENGINES,
    "Drafter": "drafter replica",
    "Coordinator": "coordinator",
    "ServeController": "Serve controller",
    "ProxyActor": "Serve proxy",
    "MasterActor": "pool: master actor",
    "StoreActor": "pool: store actor",
    "ShardActor": "context shard",
    "SlotKeeper": "slot keeper",
    "IDLE": "idle worker",
    "DashboardAgent": "dashboard agent",
    "RuntimeEnvAgent": "runtime env agent",
    "gcs_server": "GCS",
    "log_monitor": "log monitor",
    "monitor": "autoscaler monitor",
}
"""Names of processes by the role that a command line gives. Other roles are their own names."""


class Used(NamedTuple):
    """A process at one moment: its name, and processor seconds since it started."""

    name: str
    cpu_s: float


def name_of(arguments: list[str]) -> str:
    """Returns the name of a process by its command line."""
    if "multiprocessing" in arguments[0]:  # such a title is the fork server's whole command
        return "dashboard module"
    role = role_of(arguments)
    return NAMES.get(role, role)


def reading() -> dict[tuple[int, int], Used]:
    """Returns this process and all its descendants, by process id and start time in ticks: that pair is unique."""
    found = {pid: stat for folder in Path("/proc").glob("[0-9]*") if (stat := stat_of(pid := int(folder.name)))}
    ours = {os.getpid()}
    while more := {pid for pid, fields in found.items() if int(fields[1]) in ours} - ours:
        ours |= more
    used = {}
    for pid in ours & found.keys():
        fields = found[pid]
        if name := DRIVER if pid == os.getpid() else _name(pid):
            used[pid, int(fields[19])] = Used(name, (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    return used


def shares(before: Mapping, after: Mapping, seconds: float) -> dict[str, float]:
    """Returns the share of a core between two readings, by name, largest first.

    Processes of one name are summed. A process that is not in both readings is left out.
    """
    found: dict[str, float] = {}
    for key in before.keys() & after.keys():
        name = after[key].name
        found[name] = found.get(name, 0.0) + (after[key].cpu_s - before[key].cpu_s) / seconds
    return {name: round(share, 4) for name, share in sorted(found.items(), key=lambda item: (-item[1], item[0]))}


def parted(found: Mapping[str, float]) -> dict:
    """Returns the shares of engines, of the driver and of the rest, the latter in sum and by name (`of_rest`)."""
    rest = {name: share for name, share in found.items() if name not in (ENGINES, DRIVER)}
    return {
        "engines": found.get(ENGINES, 0.0),
        "driver": found.get(DRIVER, 0.0),
        "rest": round(sum(rest.values()), 4),
        "of_rest": rest,
    }


def measure(file: ServeFile, tiny: bool, as_head: bool, seconds: float, idle_s: float, say: Callable[[str], None]):
    """Returns `working` and `idle`, shares of a core, see `parted`, and `tokens_per_s` by the replicas' counters."""
    with tempfile.TemporaryDirectory(prefix="tailrace-processes-") as folder:
        if tiny:
            say("making a tiny model")
            file = with_engine(file, {"model": str(tiny_model(resolve_model("demo"), Path(folder) / "tiny"))})
        say("starting the service")
        with _service(file, as_head, Path(folder)) as client:
            replicas = file.application.args.replicas.max
            found = asyncio.run(_measured(client, replicas, seconds, idle_s, say))
    return {"model": "tiny" if tiny else file.application.args.engine.model, "head": as_head, **found}


@contextmanager
def _service(file: ServeFile, as_head: bool, folder: Path) -> Iterator[RolloutClient]:
    with head(file, folder) if as_head else contextlib.nullcontext() as address, service(file, address) as client:
        yield client


async def _measured(client: RolloutClient, replicas: int, seconds: float, idle_s: float, say) -> dict:
    await whole(client, replicas)
    async with _rolling(client):
        say(f"working: {WARM_S:.0f} s to warm up, then {seconds:.0f} s")
        await asyncio.sleep(WARM_S)
        working, tokens = await _window(client, seconds)
    say(f"idle: {SETTLE_S:.0f} s to settle, then {idle_s:.0f} s")
    await asyncio.sleep(SETTLE_S)
    idle, _ = await _window(client, idle_s)
    found = {"seconds": seconds, "tokens_per_s": round(tokens / seconds, 1), "working": parted(working)}
    return found | {"idle_seconds": idle_s, "idle": parted(idle)}


async def _window(client: RolloutClient, seconds: float) -> tuple[dict[str, float], int]:
    """Returns shares of a core, and the tokens that replicas made in `seconds`. Makes no request within the window."""
    before_tokens = await _tokens(client)
    before, began_s = reading(), time.monotonic()
    await asyncio.sleep(seconds)
    after, took_s = reading(), time.monotonic() - began_s
    return shares(before, after, took_s), round((await _tokens(client) - before_tokens) * seconds / took_s)


async def _tokens(client: RolloutClient) -> int:
    return sum(replica.work.get("tokens", 0) for replica in (await client.status()).replicas)


@asynccontextmanager
async def _rolling(client: RolloutClient) -> AsyncIterator[None]:
    """Keeps BATCHES batches in flight while the context lasts. Cancels the batches that run at its end."""
    sampling = SamplingParams(ignore_eos=True)
    prompts = read_prompts(PROMPTS, {"samples": SAMPLES, "max_tokens": TOKENS, "sampling": sampling})
    numbers = count()

    async def driver() -> None:
        while True:
            number = next(numbers)
            groups = tuple(prompts[(GROUPS * number + n) % len(prompts)] for n in range(GROUPS))
            batch = RolloutBatch(batch_id=f"bench-processes-{number}", groups=groups, seed=number, step=number)
            async for _ in client.rollout(batch):
                pass

    drivers = [asyncio.create_task(driver()) for _ in range(BATCHES)]
    try:
        yield
    finally:
        for task in drivers:
            task.cancel()
        ended = await asyncio.gather(*drivers, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            raise error


def _name(pid: int) -> str:
    """Returns the name of a process, empty if the process has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return ""
    return name_of(arguments) if arguments[0] else ""
