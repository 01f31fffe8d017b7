"""The cost of metrics and traces for an engine: a span for each chunk, our counting of steps, and vLLM's own figures.

One engine runs in a process of its own, without service or pool. Ray runs with metrics, so that vLLM's figures go all
their way. One step in two has vLLM's figures; in the service no step has. Called by `tailrace bench observability`.
"""

import os
import sys
import time
import timeit
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import fmean, median

from tailrace.deployments.messages.chunk import STEP_BOUNDS_S
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.lab.benchmarks.observability.tracing_cost import TracingCost

CONTEXT_TOKENS = 64
REPEATS = 200_000


def measure(config: EngineConfig, chunk_tokens: int, rounds: int, steps: int, say: Callable[[str], None]) -> dict:
    """Returns the figures of `rounds` times as many chunks as run at once, then of `steps` steps with vLLM's figures
    and as many without.

    Costs are shares of a step without metrics and traces.
    """
    say(f"engine: {rounds} rounds of {config.max_running} chunks of {chunk_tokens} tokens, then {2 * steps} steps")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_measure, config, chunk_tokens, rounds, steps).result()


def _measure(config: EngineConfig, chunk_tokens: int, rounds: int, steps: int) -> dict:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout, which belongs to the result
    from tailrace.app.cluster import LOOPBACK_ONLY

    os.environ.update(LOOPBACK_ONLY | {"RAY_enable_metrics_collection": "true"})
    import ray

    with ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="WARNING"):
        stepper = _started(config)
        _switch(stepper._engine, on=False)
        took_s, chunks, tracing_s = _traced(stepper, config.max_running, chunk_tokens, rounds)
        off_s, on_s = _steps(stepper, config.max_running, steps)
    step_s, counting_s = fmean(took_s), _counting_s()
    kinds = {"metrics": counting_s, "traces": tracing_s / len(took_s)}
    kinds["all"] = sum(kinds.values())
    return {
        "running": config.max_running,
        "chunks": chunks,
        "steps": len(took_s),
        "step_ms": round(1e3 * step_s, 2),
        "us_a_step": {name: round(1e6 * one_s, 3) for name, one_s in kinds.items()},
        "of_step": {name: round(one_s / step_s, 6) for name, one_s in kinds.items()},
        "vllm_of_step": round(fmean(on_s) / fmean(off_s) - 1, 4),
        "vllm_of_step_by_medians": round(median(on_s) / median(off_s) - 1, 4),
    }


def _started(config: EngineConfig):
    """Returns a Stepper whose vLLM can keep figures. The logger of vLLM gives them to Ray, as in Serve's engines."""
    from tailrace.deployments.vllm_exact import launch

    plain = launch.engine_arguments
    launch.engine_arguments = lambda config: plain(config) | {"disable_log_stats": False}
    try:
        from tailrace.deployments.engine.stepper import Stepper

        stepper = Stepper(config, "bench", 0, 0)
    finally:
        launch.engine_arguments = plain
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    engine = stepper._engine
    engine.logger_manager = StatLoggerManager(
        vllm_config=engine.vllm_config,
        custom_stat_loggers=[RayPrometheusStatLogger],
        enable_default_loggers=False,
    )
    return stepper


def _traced(stepper, running: int, chunk_tokens: int, rounds: int) -> tuple[list[float], int, float]:
    """Returns the seconds of each step, the number of chunks, and the processor seconds of the chunks' spans, export
    included.
    """
    from tailrace.deployments.engine.chunk_trace import trace_chunk
    from tailrace.deployments.engine.warmup import chunk_of
    from tailrace.deployments.telemetry import Telemetry, traceparent

    cost, telemetry = TracingCost(), Telemetry("tailrace-engine", otlp=True)
    header, took_s, chunks = traceparent(telemetry.span("rollout")), [], 0
    cost.worked_s = 0.0
    for turn in range(rounds):
        requests = {}
        for number in range(running):
            chunk = chunk_of(f"{turn}-{number}", CONTEXT_TOKENS, chunk_tokens, first_token=number)
            requests[chunk.chunk_id] = replace(chunk, traceparent=header)
            stepper.add(chunk, time.monotonic())
        while stepper.busy:
            began_s = time.perf_counter()
            ended = stepper.step()
            took_s.append(time.perf_counter() - began_s)
            for name, result in ended:
                trace_chunk(telemetry, "bench", requests[name], result, time.time_ns())
                chunks += 1
    telemetry.close()
    return took_s, chunks, cost.worked_s + cost.exported_s


def _steps(stepper, chunks: int, steps: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step without vLLM's figures, and of each with them. The order is off, on, on, off."""
    from tailrace.deployments.engine.warmup import chunk_of

    stepper.reset_cache()
    for number in range(chunks):
        chunk = chunk_of(f"bench-{number}", CONTEXT_TOKENS, 2 * steps + 16, first_token=number)
        stepper.add(chunk, time.monotonic())
    for _ in range(10):  # prompts, and the first decode steps
        stepper.step()
    took: tuple[list[float], list[float]] = ([], [])
    place = 0
    while len(took[0]) + len(took[1]) < 2 * steps:
        on = place % 4 in (1, 2)
        _switch(stepper._engine, on)
        began_s = time.perf_counter()
        stepper.step()
        took[on].append(time.perf_counter() - began_s)
        place += 1
    return took


def _switch(engine, on: bool) -> None:
    engine.log_stats = engine.engine_core.engine_core.scheduler.log_stats = on


def _counting_s() -> float:
    """Returns the seconds of our counting in one step."""
    counts = [0] * (len(STEP_BOUNDS_S) + 1)

    def count() -> None:
        counts[bisect_left(STEP_BOUNDS_S, 0.03)] += 1
        tuple(counts)

    return min(timeit.repeat(count, number=REPEATS, repeat=3)) / REPEATS
