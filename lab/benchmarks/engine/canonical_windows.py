"""`tailrace bench windows`: what canonical windows cost a bfloat16 engine on a CPU, and the flips that they remove.

Engines with windows of several sizes and one without take turns on a core, a few steps each; times are processor time.
For flips, the same samples run at once and one by one. Their tokens are compared up to each sample's first difference.
"""

from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from statistics import median

import numpy as np

from tailrace.app.errors import Failed
from tailrace.lab.benchmarks.engine.windowed_engine import Answer, WindowedEngine

ROUNDS, STEPS = 5, 2
OWN = 0
"""Size that stands for the engine's own windows, of all sizes that pass its check."""

PROMPTS = 2
"""Number of timed prompts; their median counts."""

FLIP_SAMPLES, BATCHES = 16, (16, 1)
"""Number of compared samples, and how many of them run at once in each of the two runs."""


def measure(
    model: str, samples: Sequence[int], windows: Sequence[int], tokens: int, say: Callable[[str], None]
) -> dict:
    """Returns milliseconds and cost ratios by samples and window, ratios of prompts, and flips per million tokens
    without windows and with the engine's own. `model`: a folder. `tokens`: number of tokens of a compared sample.
    """
    sizes = [None, OWN, *windows]
    engines = {size: WindowedEngine(model, max(*samples, *BATCHES), size) for size in sizes}
    try:
        flips = {}
        for name, size in (("without", None), ("with", OWN)):
            say(f"{FLIP_SAMPLES} samples of {tokens} tokens, {name} windows: at once, and one by one")
            flips[name] = flipped(*(engines[size].answers(FLIP_SAMPLES, tokens, many) for many in BATCHES))
            say(f"flips, compared tokens, other logprobs: {flips[name]}")
        steps = {count: _of_size(engines, count, say) for count in samples}
        prompts = {size: median(engine.prompt_seconds() for _ in range(PROMPTS)) for size, engine in engines.items()}
    except BrokenProcessPool:
        raise Failed("the process of an engine did not start, or died; see what it wrote above") from None
    finally:
        for engine in engines.values():
            engine.stop()
    return {
        "step_ms": {count: {_name(size): _ms(taken) for size, taken in of.items()} for count, of in steps.items()},
        "cost_ratio": {count: cost_ratios(of) for count, of in steps.items()},
        "prompt_ratio": {_name(size): round(prompts[size] / prompts[None], 3) for size in sizes[1:]},
        "flips_per_million": {name: round(1e6 * found / of) for name, (found, of, _) in flips.items()},
        "flips": {name: found for name, (found, _, _) in flips.items()},
        "compared_tokens": {name: of for name, (_, of, _) in flips.items()},
        "other_logprobs": {name: others for name, (_, _, others) in flips.items()},
    }


def _of_size(engines: dict[int | None, WindowedEngine], samples: int, say: Callable[[str], None]) -> dict:
    """Returns the seconds of a step, by window and round."""
    say(f"{samples} samples: {ROUNDS} rounds of {STEPS} steps")
    for engine in engines.values():
        engine.begin(samples)
    taken: dict[int | None, list[float]] = {size: [] for size in engines}
    order = list(engines)
    for turn in range(ROUNDS):
        first = turn % len(order)
        for size in order[first:] + order[:first]:
            taken[size].append(engines[size].seconds(STEPS) / STEPS)
    for engine in engines.values():
        engine.end()
    say(f"{samples} samples: {cost_ratios(taken)} of {_ms(taken[None])} ms a step")
    return taken


def cost_ratios(taken: dict[int | None, Sequence[float]]) -> dict[str, float]:
    """Returns, by window, the median over the rounds of a step's time divided by the time without windows in the same
    round.
    """
    base = taken[None]
    return {
        _name(size): round(median(one / plain for one, plain in zip(of, base, strict=True)), 3)
        for size, of in taken.items()
        if size is not None
    }


def flipped(one: Sequence[Answer], other: Sequence[Answer]) -> tuple[int, int, int]:
    """Returns three numbers: samples whose tokens differ, compared tokens, and compared tokens whose raw logprobs
    differ. Tokens are compared up to each sample's first difference.
    """
    flips, compared, others = 0, 0, 0
    for (a, a_logprobs), (b, b_logprobs) in zip(one, other, strict=True):
        unlike = np.flatnonzero(a != b)
        flips += len(unlike) > 0
        end = int(unlike[0]) + 1 if len(unlike) else len(a)
        compared += end
        others += int((a_logprobs[:end] != b_logprobs[:end]).sum())
    return flips, compared, others


def _name(size: int | None) -> str:
    return {None: "without", OWN: "own"}.get(size, str(size))


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 2)
