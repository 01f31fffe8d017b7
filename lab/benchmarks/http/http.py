"""Requests a second over HTTP: our gateway against `vllm serve`, the same load on the same model, one after the other.

Called by `tailrace bench http`.
"""

import json
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from tailrace.app.config import ServeFile
from tailrace.app.errors import Failed
from tailrace.app.model import resolve_model
from tailrace.lab.benchmarks.http import servers

WARM_UP = 64
"""Requests before the first turn, not counted."""

FILES_OF_ONE_REQUEST = 2
SPARE_FILES = 500


def measure(
    file: ServeFile, requests: int, max_tokens: int, max_running: int, repeats: int, say: Callable[[str], None]
) -> dict:
    """Figures of both servers: medians over `repeats` turns of `requests` at once. `ratio_to_vllm`: of requests/s;
    `p99_to_vllm`: of p99.
    """
    allow_files(requests * FILES_OF_ONE_REQUEST + SPARE_FILES)
    with tempfile.TemporaryDirectory(prefix="tailrace-http-") as scratch:
        say("making a tiny model")
        model = servers.tiny_model(resolve_model("demo"), Path(scratch) / "tiny")
        shape = servers.EngineShape(model, max_running)
        found = {}
        for name, server in (
            ("vllm", servers.vllm(shape, Path(scratch) / "vllm.log")),
            ("tailrace", servers.ours(file, shape)),
        ):
            say(f"{name}: starting")
            with server as address:
                found[name] = turns(name, address, model.name, requests, max_tokens, repeats, say)
    ours, theirs = found["tailrace"], found["vllm"]
    return {
        "requests_per_s": ours["requests_per_s"],
        "ratio_to_vllm": round(ours["requests_per_s"] / theirs["requests_per_s"], 3),
        "p99_to_vllm": round(ours["p99_s"] / theirs["p99_s"], 3),
        "errors": sum(sum(one["errors"].values()) for one in found.values()),
        "servers": found,
        "requests": requests,
        "max_tokens": max_tokens,
        "max_running": max_running,
        "repeats": repeats,
    }


def turns(
    name: str, address: str, model: str, requests: int, max_tokens: int, repeats: int, say: Callable[[str], None]
) -> dict:
    loaded(address, model, 0, min(WARM_UP, requests), max_tokens)
    rates, latencies, errors = [], [], Counter()
    for turn in range(1, repeats + 1):
        got = loaded(address, model, turn, requests, max_tokens)
        if not got["latencies_s"]:
            raise Failed(f"{name}: no request was answered: {got['errors']}")
        rates.append(len(got["latencies_s"]) / got["seconds"])
        latencies.append(np.percentile(got["latencies_s"], (50, 99)))
        errors.update(got["errors"])
        say(f"{name}: {rates[-1]:.1f} requests/s, p99 {latencies[-1][1]:.2f} s, errors {got['errors']}")
    p50, p99 = (round(float(median(column)), 3) for column in zip(*latencies, strict=True))
    return {
        "requests_per_s": round(median(rates), 1),
        "turns": [round(rate, 1) for rate in rates],
        "tokens_per_s": round(median(rates) * max_tokens, 1),
        "p50_s": p50,
        "p99_s": p99,
        "errors": dict(errors),
    }


def loaded(address: str, model: str, turn: int, requests: int, max_tokens: int) -> dict:
    """The figures of one load. Raises Failed with the last line of its error."""
    command = [
        sys.executable,
        "-m",
        "tailrace.lab.benchmarks.http.load",
        address,
        model,
        *map(str, (turn, requests, max_tokens)),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Failed(f"the load ended with {run.returncode}: {run.stderr.strip().splitlines()[-1:]}")
    return json.loads(run.stdout)


def allow_files(wanted: int) -> None:
    """Raise this process's limit of open files, which its children get too. Raises Failed if it may not be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > hard != resource.RLIM_INFINITY:
        raise Failed(f"{wanted} open files are needed, and the limit is {hard}; give fewer --requests")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
