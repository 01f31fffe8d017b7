"""Benchmark of requests over HTTP: our gateway and `vllm serve`, in turns, with the same load on the same model.

Called by `tailrace bench http`.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from tailrace.app.config import ServeFile, with_engine
from tailrace.app.errors import Failed
from tailrace.app.model import resolve_model
from tailrace.lab.benchmarks.http import servers

WARM_UP = 64
"""Maximum number of requests to a server before the first turn, which are not counted."""

NO_DRAFTS = {"draft": {"method": "off"}}
"""Setting of our engine, which must do what vLLM's engine does: drafts from mates are no merit of the gateway."""

FILES_OF_ONE_REQUEST = 2
SPARE_FILES = 500


class HttpLoad(NamedTuple):
    """The load of a turn: `count` completions of `max_tokens` tokens, all open at once."""

    count: int
    max_tokens: int
    temperature: float = 1.0


def measure(file: ServeFile, requests: HttpLoad, max_running: int, repeats: int, say: Callable[[str], None]) -> dict:
    """Returns the figures of both servers, medians over `repeats` turns. `ratio_to_vllm`: our requests per second over
    those of vLLM. `p99_to_vllm`: our 99th percentile of latency over that of vLLM.
    """
    allow_files(requests.count * FILES_OF_ONE_REQUEST + SPARE_FILES)
    with tempfile.TemporaryDirectory(prefix="tailrace-http-") as scratch:
        say("making a tiny model")
        model = servers.tiny_model(resolve_model("demo"), Path(scratch) / "tiny")
        shape, log = servers.EngineShape(model, max_running), Path(scratch) / "vllm.log"
        say("starting both servers")
        with servers.vllm(shape, log) as theirs, servers.ours(with_engine(file, NO_DRAFTS), shape) as ours:
            addresses = {"vllm": theirs, "tailrace": ours}
            found = turns(addresses, model.name, requests, repeats, say)
    ours, theirs = found["tailrace"], found["vllm"]
    return {
        "requests_per_s": ours["requests_per_s"],
        "ratio_to_vllm": round(ours["requests_per_s"] / theirs["requests_per_s"], 3),
        "p99_to_vllm": round(ours["p99_s"] / theirs["p99_s"], 3),
        "errors": sum(sum(one["errors"].values()) for one in found.values()),
        "servers": found,
        "requests": requests.count,
        "max_tokens": requests.max_tokens,
        "temperature": requests.temperature,
        "max_running": max_running,
        "repeats": repeats,
    }


def turns(
    addresses: Mapping[str, str],
    model: str,
    requests: HttpLoad,
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, dict]:
    """Returns the figures of each server by its name. The servers take turns, and the one that waits is idle."""
    loads: dict[str, list[dict]] = {name: [] for name in addresses}
    for address in addresses.values():
        loaded(address, model, 0, requests._replace(count=min(WARM_UP, requests.count)))
    for turn in range(1, repeats + 1):
        for name, address in addresses.items():
            got = loaded(address, model, turn, requests)
            if not got["latencies_s"]:
                raise Failed(f"{name}: no request was answered: {got['errors']}")
            loads[name].append(got)
            rate, p99 = len(got["latencies_s"]) / got["seconds"], np.percentile(got["latencies_s"], 99)
            say(f"{name}: {rate:.1f} requests/s, p99 {p99:.2f} s, errors {got['errors']}")
    return {name: figures(of_server, requests.max_tokens) for name, of_server in loads.items()}


def figures(loads: Sequence[dict], max_tokens: int) -> dict:
    """Returns medians over one server's loads, and the errors of all."""
    rates = [len(one["latencies_s"]) / one["seconds"] for one in loads]
    latencies = [np.percentile(one["latencies_s"], (50, 99)) for one in loads]
    p50, p99 = (round(float(median(column)), 3) for column in zip(*latencies, strict=True))
    return {
        "requests_per_s": round(median(rates), 1),
        "turns": [round(rate, 1) for rate in rates],
        "tokens_per_s": round(median(rates) * max_tokens, 1),
        "p50_s": p50,
        "p99_s": p99,
        "errors": dict(sum((Counter(one["errors"]) for one in loads), Counter())),
    }


def loaded(address: str, model: str, turn: int, requests: HttpLoad) -> dict:
    """Runs one load in a process of its own. Returns its figures. Raises Failed with the last line of its error."""
    command = [
        sys.executable,
        "-m",
        "tailrace.lab.benchmarks.http.load",
        address,
        model,
        *map(str, (turn, *requests)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Failed(f"the load ended with {run.returncode}: {run.stderr.strip().splitlines()[-1:]}")
    return json.loads(run.stdout)


def allow_files(wanted: int) -> None:
    """Increases the limit of open files of this process, which its children inherit, to `wanted`. Raises Failed if the
    hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > hard != resource.RLIM_INFINITY:
        raise Failed(f"{wanted} open files are needed, and the limit is {hard}; give fewer --requests")
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
