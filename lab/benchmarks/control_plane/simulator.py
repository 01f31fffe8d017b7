"""Benchmark of the simulator: seconds for a large cluster, and the cost of an event there against a small cluster.

Each run has a process of its own, so that its memory is measured alone. `peak_mb`: greatest resident size of the large
run in MiB, imports included. `cost_ratio`: time per event of the large run over that of a small run with as many
samples per replica. The fastest small run counts: other work on a shared machine only ever makes a run slower. Called
by `tailrace bench simulator`.
"""

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from tailrace.lab.simulator.hardware import replica_model
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.types import Cluster, Workload, WorkloadGroup
from tailrace.policies.families.registry import Policies

GROUP_SAMPLES = 16
SMALL = 1_024
CHUNK_TOKENS = 8_192
SPREAD = 0.4
"""Standard deviation of the logarithms of answer lengths. The lengths are scaled to the requested mean, then cut at
twice that mean.
"""

REPEATS = 3


def workload(samples: int, tokens: int) -> Workload:
    """Returns groups of GROUP_SAMPLES samples, whose answers have `tokens` tokens on average."""
    random = np.random.Generator(np.random.Philox(0))
    drawn = random.lognormal(0.0, SPREAD, (samples // GROUP_SAMPLES, GROUP_SAMPLES))
    lengths = np.clip(drawn * (tokens / drawn.mean()), 1, 2 * tokens).astype(int).tolist()
    groups = tuple(WorkloadGroup(f"g{index}", 500, tuple(row)) for index, row in enumerate(lengths))
    return Workload("bench", 2 * tokens, (groups,))


def drive(samples: int, replicas: int, tokens: int, drafting: str) -> dict:
    """Runs one simulation in this process. Returns its seconds, its events, the simulated makespan in seconds, and the
    greatest resident size of the process in MiB.
    """
    policies = Policies(chunking={"type": "fixed", "chunk_tokens": CHUNK_TOKENS}, drafting=drafting)
    acceptance = None if drafting == "off" else _Even()
    work, cluster = workload(samples, tokens), Cluster(replica_model("H800", "Qwen2.5-32B", 4), replicas, 2)
    began_s = time.perf_counter()
    run = simulate(work, cluster, policies, acceptance=acceptance)
    took_s = time.perf_counter() - began_s
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"wall_s": took_s, "events": run.events, "makespan_s": run.makespan_s, "peak_mb": peak_kb / 1024}


class _Even:
    def chance(self, group, index, generated, mates, epochs) -> float:
        return 0.6


def measure(samples: int = 16_384, replicas: int = 512, tokens: int = 20_000, drafting: str = "off") -> dict:
    """Returns the figures of the large run. `cost_ratio`: its time per event over that of a run of SMALL samples, with
    as many samples per replica.
    """
    large = _best(samples, replicas, tokens, drafting, 1)
    small = _best(SMALL, max(1, replicas * SMALL // samples), tokens, drafting, REPEATS)
    per_event_s, small_s = (run["wall_s"] / run["events"] for run in (large, small))
    return {
        "samples": samples,
        "replicas": replicas,
        "tokens": tokens,
        "drafting": drafting,
        "wall_s": round(large["wall_s"], 2),
        "peak_mb": round(large["peak_mb"], 1),
        "events": large["events"],
        "events_per_s": round(1 / per_event_s),
        "cost_ratio": round(per_event_s / small_s, 3),
        "makespan_s": round(large["makespan_s"], 1),
    }


def _best(samples: int, replicas: int, tokens: int, drafting: str, repeats: int) -> dict:
    runs = [_in_a_child(samples, replicas, tokens, drafting) for _ in range(repeats)]
    return min(runs, key=lambda run: run["wall_s"])


def _in_a_child(*args) -> dict:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(drive, *args).result()
