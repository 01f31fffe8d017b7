"""Benchmark of results on their way from their chunks to a driver: a whole step, which the driver keeps, and one group.

The records of samples, the deliveries, Serve's stream and the client are those of a service; the chunks are random.
Invariant: what was started is stopped. Called by `tailrace bench results`.
"""

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import numpy as np

from tailrace.app.errors import Failed
from tailrace.deployments.messages.rollout import GroupResult, PromptGroup, RolloutBatch
from tailrace.lab.benchmarks.control_plane.control_ray import cluster
from tailrace.lab.benchmarks.control_plane.results_source import ResultSource, resident_bytes

APP = "bench-results"
GROUP_SAMPLES = 16
LONG_TOKENS = 32_768
WATCH_S = 0.5
"""Seconds for which the loop is watched, from the last chunks of a long group on. The driver has the group long before
they are over.
"""

MEASURE_S = 600.0


def measure(model: str, samples: int, tokens: int, repeats: int, say: Callable[[str], None]) -> dict:
    """Returns `step`: figures of `samples` samples of `tokens` tokens on average, which the driver keeps; and `group`:
    figures of one group of GROUP_SAMPLES samples of LONG_TOKENS tokens. Raises Failed, in one line, if Ray fails.
    """
    with cluster():
        from ray import serve
        from ray.exceptions import RayError

        from tailrace.app.calls.client import RolloutClient

        try:
            source = serve.deployment(ResultSource).options(max_ongoing_requests=10_000).bind(model)
            handle = serve.run(source, name=APP, route_prefix=None)
            client = RolloutClient(handle=handle)
            found = {"group": group(client, handle, repeats)}
            say(f"group: {found['group']}")
            return found | {"step": step(client, handle, samples, tokens)}
        except (RayError, RuntimeError, TimeoutError) as error:
            raise Failed(f"Ray: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}") from error


def group(client: Any, handle: Any, repeats: int) -> dict:
    """Returns milliseconds of one long group, median and maximum over `repeats` runs. `came_ms`: from its last chunk to
    its arrival at the driver, with nothing else running. `loop_held_ms` and `loop_held_cpu_ms`, in other runs: longest
    hold of the coordinator's loop meanwhile, by the clock and by the loop's processor time.
    """
    came_ms, held_ms, held_cpu_ms = [], [], []
    for number in range(2 * repeats + 1):
        watched = number > repeats
        handle.watch.remote(WATCH_S if watched else 0.0).result(timeout_s=MEASURE_S)
        for _ in client.rollout_blocking(batch_of(f"group-{number}", [LONG_TOKENS])):
            came_s = time.time()
        time.sleep(WATCH_S)
        seen = handle.seen.remote().result(timeout_s=MEASURE_S)
        if watched:
            held_ms.append(seen["held_ms"])
            held_cpu_ms.append(seen["held_cpu_ms"])
        elif number:  # the first one opens connections
            came_ms.append(1e3 * (came_s - seen["ended_s"]))
    spreads = {"came_ms": came_ms, "loop_held_ms": held_ms, "loop_held_cpu_ms": held_cpu_ms}
    sizes = {"samples": GROUP_SAMPLES, "tokens": LONG_TOKENS}
    return sizes | {
        name: {"median": round(median(values), 2), "max": round(max(values), 2)} for name, values in spreads.items()
    }


def step(client: Any, handle: Any, samples: int, tokens: int) -> dict:
    """Returns the seconds of a step whose driver keeps every group, the driver's bytes per token, and the coordinator's
    peak memory in MB.
    """
    lengths = np.random.default_rng(1).integers(1, 2 * tokens, samples // GROUP_SAMPLES).tolist()
    before, began_s = resident_bytes("RssAnon", "RssShmem"), time.perf_counter()
    kept = list(client.rollout_blocking(batch_of("step", lengths)))
    took_s = time.perf_counter() - began_s
    made = sum(touched(kept))
    grown = resident_bytes("RssAnon", "RssShmem") - before
    seen = handle.seen.remote().result(timeout_s=MEASURE_S)
    return {
        "samples": samples,
        "tokens": made,
        "seconds": round(took_s, 1),
        "coordinator_peak_mb": round(seen["peak_bytes"] / 1e6),
        "driver_bytes_per_token": round(grown / made, 1),
    }


def touched(groups: Iterable[GroupResult]) -> Iterable[int]:
    """Yields the number of tokens of each sample, after a read of its arrays: pages of Ray's object store count as the
    driver's only once they are read.
    """
    for sample in (sample for group in groups for sample in group.samples):
        for column in (sample.token_ids, sample.logprobs, sample.raw_logprobs):
            if (array := getattr(column, "array", None)) is not None:
                array.sum()
        yield len(sample.token_ids)


def batch_of(name: str, lengths: list[int]) -> RolloutBatch:
    """Returns a batch with one group for each length in tokens."""
    return RolloutBatch(
        batch_id=name,
        groups=tuple(
            PromptGroup(prompt_id=str(number), token_ids=(1, 2, 3), samples=GROUP_SAMPLES, max_tokens=length)
            for number, length in enumerate(lengths)
        ),
    )
