"""The way of results from their chunks to a driver's hands: a whole step's, which the driver keeps, and one long group.

The ledger, the deliveries, Serve's stream and the client are those of a service; the chunks come from nowhere.
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
"""From the last chunk of a long group on; it is with the driver long before."""

MEASURE_S = 600.0


def measure(model: str, samples: int, tokens: int, repeats: int, say: Callable[[str], None]) -> dict:
    """`step`: `samples` of `tokens` on average, kept; `group`: GROUP_SAMPLES of LONG_TOKENS. Raises Failed."""
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
    """Milliseconds of one long group, medians and greatest over `repeats`: from its last chunk to the driver, with
    nothing else running; and, in other runs, for which the coordinator's loop was held meanwhile."""
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
    """Seconds of a step whose driver keeps every group; bytes a token there, and the peak of the coordinator."""
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
    """The tokens of each sample, after a look at all of its pages: those of Ray's store count once they are seen."""
    for sample in (sample for group in groups for sample in group.samples):
        for column in (sample.token_ids, sample.logprobs, sample.raw_logprobs):
            if (array := getattr(column, "array", None)) is not None:
                array.sum()
        yield len(sample.token_ids)


def batch_of(name: str, lengths: list[int]) -> RolloutBatch:
    """A group of each length in tokens."""
    return RolloutBatch(
        batch_id=name,
        groups=tuple(
            PromptGroup(prompt_id=str(number), token_ids=(1, 2, 3), samples=GROUP_SAMPLES, max_tokens=length)
            for number, length in enumerate(lengths)
        ),
    )
