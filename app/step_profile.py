"""The cost of a step of the configured engine: by chunks, draft tokens and context, and by prompt tokens.

One engine in a separate process, without service or pool. Wrong drafts are verified, so that every step of a point
computes the same number of tokens; the median step in which all chunks decode counts. Called by `tailrace profile`.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from statistics import median
from threading import Thread

from tailrace.app.errors import Failed
from tailrace.deployments.vllm_exact.engine_config import EngineConfig

STEPS = 8
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
DRAFTS = (0, 1, 3, 7, 15)
MOST_TOKENS = 128
"""Maximum tokens of a step; the cost beyond is a line."""

CONTEXTS = (32, 512, 2048)
PROMPTS = (32, 128, 512, 1024)


def points(max_running: int, max_context: int, drafts: Sequence[int] = DRAFTS) -> list[tuple[int, int, int]]:
    """Returns (chunks, draft tokens of each, context tokens of each): the grid, and two more points per longer
    context.
    """
    chunks = [count for count in CHUNKS if count <= max_running]
    grid = [(c, d, CONTEXTS[0]) for c in chunks for d in drafts if c * (1 + d) <= MOST_TOKENS]
    long = [context for context in CONTEXTS[1:] if context + STEPS * 2 < max_context]
    return grid + [(c, 0, context) for context in long for c in (1, min(4, max_running))]


def measure(config: EngineConfig, say: Callable[[str], None], drafts: Sequence[int] = DRAFTS) -> dict:
    """Returns milliseconds of each point, of prompts, and a fit: base + tokens * per token + context read * per token
    of it.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_start, initargs=(config,)) as process:
        try:
            say(f"starting {config.model}")
            limits = process.submit(_limits).result()
            steps = []
            for chunks, draft, context in points(*limits, drafts):
                took_ms = process.submit(_step_ms, chunks, draft, context).result()
                point = f"{chunks} chunks x {1 + draft} tokens, context {context}"
                if took_ms is None:
                    say(f"{point}: left out, the first ones end before all decode")
                    continue
                steps.append({"chunks": chunks, "draft_tokens": draft, "context_tokens": context, "step_ms": took_ms})
                say(f"{point}: {took_ms} ms")
            prompts = [tokens for tokens in PROMPTS if tokens < limits[1]]
            prefill = {tokens: process.submit(_prefill_ms, tokens).result() for tokens in prompts}
        except BrokenProcessPool:
            raise Failed("the engine's process did not start, or died; see its output above") from None
    return {"model": config.model, "steps": steps, "prefill_ms": prefill, "fit": fit(steps)}


def fit(steps: list[dict]) -> dict[str, float]:
    """Returns least squares of step = base + per_token * tokens + per_context_token * chunks * context, relative
    errors.
    """
    import numpy as np

    tokens = np.array([s["chunks"] * (1 + s["draft_tokens"]) for s in steps])
    read = np.array([s["chunks"] * s["context_tokens"] for s in steps])
    took_ms = np.array([s["step_ms"] for s in steps])
    rows = np.column_stack([np.ones_like(tokens), tokens, read]) / took_ms[:, None]
    base, per_token, per_read = np.linalg.lstsq(rows, np.ones(len(steps)), rcond=None)[0]
    return {
        "base_ms": round(float(base), 4),
        "per_token_ms": round(float(per_token), 4),
        "per_context_token_us": round(float(per_read) * 1e3, 4),
    }


def planner_step(fit: dict[str, float], context_tokens: int, drafts: bool) -> dict[str, float]:
    """Returns the seconds of a step at a mean context, by the names of `policies.draft_models`: for a draft model, in
    which each sample has one token in a step (`drafts`), or for an engine that verifies.
    """
    base_s, token_s = max(fit["base_ms"], 1e-3) / 1e3, max(fit["per_token_ms"], 0.0) / 1e3
    sample_s = max(fit["per_context_token_us"], 0.0) / 1e6 * context_tokens
    more = {"sample_s": sample_s + token_s} if drafts else {"sample_s": sample_s, "token_s": token_s}
    return {name: round(seconds, 9) for name, seconds in ({"base_s": base_s} | more).items()}


# ---- in the engine's process -----------------------------------------------------------------------------

_stepper = None
"""The Stepper that the calls of this process share."""


def _start(config: EngineConfig) -> None:
    global _stepper  # noqa: PLW0603 - a worker process has no other place for what its calls share
    from multiprocessing import parent_process

    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout, which belongs to the result
    from tailrace.deployments.engine.stepper import Stepper

    _stepper = Stepper(config, "profile", 0, 0)


def _limits() -> tuple[int, int]:
    stats = _stepper.stats()
    return stats.max_running, stats.max_model_len


def _step_ms(chunks: int, drafts: int, context: int) -> float | None:
    """Returns the median milliseconds of the steps in which all chunks decode, or None if there are none."""
    from tailrace.deployments.engine.warmup import WRONG

    steps = _run(chunks, context, STEPS + 1, [WRONG] * drafts)
    took_ms = [step_ms for step_ms, decoding in steps if decoding == chunks]
    return round(median(took_ms), 3) if took_ms else None


def _prefill_ms(tokens: int) -> float:
    """Returns milliseconds of a prompt's steps until its first token, of the fastest of three runs."""
    return round(min(sum(step_ms for step_ms, _ in _run(1, tokens, 1, [])) for _ in range(3)), 3)


def _run(chunks: int, context: int, max_tokens: int, draft: list[int]) -> list[tuple[float, int]]:
    """Returns every step until all of these chunks have ended: its milliseconds, and the number of chunks that had a
    token before it. Nothing is cached from before.
    """
    from tailrace.deployments.engine.warmup import chunk_of

    _stepper.reset_cache()
    names = [f"profile-{number}" for number in range(chunks)]
    for number, name in enumerate(names):
        _stepper.add(chunk_of(name, context, max_tokens, first_token=number), time.monotonic())
    steps, ended = [], 0
    while ended < chunks:
        decoding = sum(len(_stepper.peek(name)) > 0 for name in names)
        began_s = time.perf_counter()
        ended += len(_stepper.step())
        steps.append(((time.perf_counter() - began_s) * 1e3, decoding))
        _stepper.draft_for_all(draft)
    while _stepper.busy:
        _stepper.step()
    return steps
