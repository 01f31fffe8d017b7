"""The cost of tracing to an engine: full chunks of the demo model on one engine, each with a span that is exported.

One engine in a process of its own, without service or pool, as `tailrace profile` has it. Called by
`tailrace bench tracing`.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median

from benchmarks.engine.tracing_cost import TracingCost, share
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

CONTEXT_TOKENS = 128


def measure(config: EngineConfig, chunk_tokens: int, rounds: int, say: Callable[[str], None]) -> dict:
    """Figures of `rounds` times as many chunks as run at once."""
    say(f"engine: {rounds} rounds of {config.max_running} chunks of {chunk_tokens} tokens")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_measure, config, chunk_tokens, rounds).result()


def _measure(config: EngineConfig, chunk_tokens: int, rounds: int) -> dict:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout, which belongs to the result
    from tailrace.deployments.engine.chunk_trace import trace_chunk
    from tailrace.deployments.engine.stepper import Stepper
    from tailrace.deployments.engine.warmup import chunk_of
    from tailrace.deployments.telemetry import Telemetry, traceparent

    cost, telemetry = TracingCost(), Telemetry("tailrace-engine", otlp=True)
    stepper, steps_s, chunks = Stepper(config, "tracing", 0, 0), [], 0
    header = traceparent(telemetry.span("rollout"))
    began_s, cost.worked_s = time.process_time(), 0.0
    for turn in range(rounds):
        requests = {}
        for number in range(config.max_running):
            chunk = chunk_of(f"{turn}-{number}", CONTEXT_TOKENS, chunk_tokens, first_token=number)
            requests[chunk.chunk_id] = replace(chunk, traceparent=header)
            stepper.add(chunk, time.monotonic())
        while stepper.busy:
            step_s = time.perf_counter()
            ended = stepper.step()
            steps_s.append(time.perf_counter() - step_s)
            for name, result in ended:
                trace_chunk(telemetry, "tracing", requests[name], result, time.time_ns())
                chunks += 1
    telemetry.close()
    all_s, tracing_s = time.process_time() - began_s, cost.worked_s + cost.exported_s
    return {
        "step_ms": round(1e3 * median(steps_s), 2),
        "steps": len(steps_s),
        "chunks": chunks,
        "us_a_chunk": round(1e6 * tracing_s / chunks, 1),
        "us_a_step": round(1e6 * tracing_s / len(steps_s), 2),
        "share": share(tracing_s, all_s),
        "share_of_steps": share(tracing_s, sum(steps_s) + tracing_s),
    }
