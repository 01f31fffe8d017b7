"""The cost of metrics for an engine's step: our counting of steps, and vLLM's own figures through Ray, one step in two.

One engine in this process, and a Ray with metrics beside it, so that vLLM's figures go all their way. Called by
`tailrace bench metrics`.
"""

import time
import timeit
from bisect import bisect_left
from collections.abc import Callable
from statistics import median

from tailrace.deployments.messages.chunk import STEP_BOUNDS_S
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

CONTEXT_TOKENS = 64
REPEATS = 200_000


def measure(config: EngineConfig, chunks: int, steps: int, say: Callable[[str], None]) -> dict:
    """Means over `steps` decode steps of each kind, of `chunks` chunks. Costs are shares of a step without either."""
    say(f"starting {config.model}")
    stepper = _started(config)
    off_s, on_s = _steps(stepper, chunks, steps)
    return {
        "chunks": chunks,
        "steps": len(off_s),
        "step_ms": round(1e3 * sum(off_s) / len(off_s), 4),
        "ours_us": round(1e6 * (ours_s := _counting_s()), 3),
        "ours_cost": round(ours_s / (sum(off_s) / len(off_s)), 7),
        "vllm_step_ms": round(1e3 * sum(on_s) / len(on_s), 4),
        "vllm_cost": round(sum(on_s) / len(on_s) / (sum(off_s) / len(off_s)) - 1, 4),
        "vllm_cost_by_medians": round(median(on_s) / median(off_s) - 1, 4),
    }


def _started(config: EngineConfig):
    """A Stepper whose vLLM can keep figures; its logger gives them to Ray, as Serve's engines do."""
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


def _steps(stepper, chunks: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of steps without and with vLLM's figures, in the order off, on, on, off."""
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
    """Seconds of our counting in one step."""
    counts = [0] * (len(STEP_BOUNDS_S) + 1)

    def count() -> None:
        counts[bisect_left(STEP_BOUNDS_S, 0.03)] += 1
        tuple(counts)

    return min(timeit.repeat(count, number=REPEATS, repeat=3)) / REPEATS
