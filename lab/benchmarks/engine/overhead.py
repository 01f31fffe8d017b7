"""`tailrace bench overhead`: the time that Tailrace adds to a step of vLLM's engine, by part of the step.

The model is so small that the other parts of a step can be measured. Stock vLLM's engine and ours without drafts, with
drafts that miss and with drafts that hit take turns on one core. Each runs a few steps per turn, so that a busy machine
slows all of them alike. Timers around the parts measure processor time of the step's thread (step_parts.py).
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from statistics import median

from tailrace.app.errors import Failed
from tailrace.kvpool.pool_config import PoolConfig, PoolEndpoint
from tailrace.lab.benchmarks.engine.overhead_engines import (
    HIT,
    KINDS,
    MISS,
    OFF,
    POOL,
    STOCK,
    V1,
    V2,
    VOCABULARY,
    EngineProcess,
    TimedSteps,
)
from tailrace.lab.benchmarks.engine.step_parts import DRAFTING, KERNELS, MODEL, SAMPLER
from tailrace.lab.benchmarks.http.servers import tiny_model
from tailrace.lab.benchmarks.pool.pool_testbed import run, running_pool

ROUNDS, STEPS = 8, 8
FIRST_FAVOURED, FAVOURED = 1_000, 64
"""First token id of those that the model favours, and their number; see `talkative`."""

WARM_STEPS = 16
"""Number of steps of each engine before the first round. The engine learns the costs of steps, and which drafts do not
pay.
"""


def measure(demo: Path, samples: Sequence[int], with_pool: bool, with_v2: bool, say: Callable[[str], None]) -> dict:
    """Returns milliseconds of a step by samples and engine, and ratios of engines. `demo`: the demo model's folder."""
    found = run(_with_pool(demo, samples, say)) if with_pool else _measure(demo, samples, KINDS[:-1], None, say)
    result = {"rounds": ROUNDS, "steps": STEPS, "samples": found}
    result["host_ratio"] = {V1: {count: each["outside_ratio"] for count, each in found.items()}}
    if with_v2:
        second = _measure(demo, samples, (STOCK, OFF), None, say, V2)
        result["samples_v2"] = second
        result["host_ratio"][V2] = {count: each["host_ratio"] for count, each in second.items()}
    return result


async def _with_pool(demo: Path, samples: Sequence[int], say: Callable[[str], None]) -> dict:
    async with running_pool(PoolConfig(dram_gib=0.5)) as pool:
        return await asyncio.to_thread(_measure, demo, samples, KINDS, pool.endpoint, say)


def _measure(
    demo: Path,
    samples: Sequence[int],
    kinds: Sequence[str],
    pool: PoolEndpoint | None,
    say: Callable[[str], None],
    runner: str = V1,
) -> dict:
    with tempfile.TemporaryDirectory(prefix="tailrace-overhead-") as folder:
        # An interpreted kernel takes long for a large vocabulary, and the host's work does not depend on its size.
        vocabulary = {V2: VOCABULARY}.get(runner, 49_152)
        model = str(talkative(tiny_model(demo, Path(folder) / "tiny", vocabulary)))
        engines = {kind: EngineProcess(model, max(samples), kind, pool, runner) for kind in kinds}
        try:
            return {count: _of_size(engines, count, say) for count in samples}
        except BrokenProcessPool:
            raise Failed("the process of an engine did not start, or died; see what it wrote above") from None
        finally:
            for engine in engines.values():
                engine.stop()


def talkative(folder: Path) -> Path:
    """Changes the model in a folder so that nearly all its tokens are one of FAVOURED, each about equally often.

    Returns the folder. Answers from the whole vocabulary would repeat nothing, so an index would find nothing to draft
    from. Answers from few tokens often repeat single tokens and pairs. A draft of the token after a repeated one is
    right with a chance of one in FAVOURED.
    """
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    embedding, norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    embedding[:, 0], norm[0] = 1.0, 2.0
    embedding[FIRST_FAVOURED : FIRST_FAVOURED + FAVOURED, 0] = 1.5
    save_file({name: torch.clone(weight) for name, weight in weights.items()}, file, metadata={"format": "pt"})
    return folder


def _of_size(engines: dict[str, EngineProcess], samples: int, say: Callable[[str], None]) -> dict:
    for kind, engine in engines.items():
        say(f"{samples} samples: prompts of {kind}")
        engine.begin(samples)
        engine.run(WARM_STEPS)
    say(f"{samples} samples: {ROUNDS} rounds of {STEPS} steps")
    taken: dict[str, list[TimedSteps]] = {kind: [] for kind in engines}
    for turn in range(ROUNDS):
        order = list(engines)
        for kind in order[turn % len(order) :] + order[: turn % len(order)]:
            taken[kind].append(engines[kind].run(STEPS))
    for engine in engines.values():
        engine.end()
    return {kind: figures(samples, runs) for kind, runs in taken.items()} | ratios(taken)


def figures(samples: int, runs: Sequence[TimedSteps]) -> dict:
    """Returns medians over the rounds, in milliseconds per step. `drafted` and `tokens` are means per sample and step.

    `proposal_ms_per_step`: time of the step's thread for the proposals of all samples and for their new tokens.
    """
    parts = sorted({name for run in runs for name in run.parts_s})
    steps = sum(run.steps for run in runs)
    return {
        "wall_ms": _ms(run.wall_s / run.steps for run in runs),
        "process_ms": _ms(run.process_s / run.steps for run in runs),
        "outside_ms": _ms(outside_s(run) for run in runs),
        "proposal_ms_per_step": _ms(sum(run.parts_s.get(name, 0.0) for name in DRAFTING) / run.steps for run in runs),
        "parts_ms": {name: _ms(run.parts_s.get(name, 0.0) / run.steps for run in runs) for name in parts},
        "tokens": round(sum(run.tokens for run in runs) / steps / samples, 3),
        "drafted": round(sum(run.drafted for run in runs) / steps / samples, 3),
    }


def outside_s(run: TimedSteps) -> float:
    """Returns the seconds of processor time per step outside model and sampler, other threads included."""
    return (run.process_s - run.parts_s.get(MODEL, 0.0) - run.parts_s.get(SAMPLER, 0.0)) / run.steps


def host_s(run: TimedSteps) -> float:
    """Returns the seconds of processor time per step of V2's thread outside model and kernels. A GPU would wait for
    that long between two passes if no step were scheduled ahead.
    """
    return (sum(run.parts_s.values()) - run.parts_s.get(MODEL, 0.0) - run.parts_s.get(KERNELS, 0.0)) / run.steps


def ratios(taken: dict[str, Sequence[TimedSteps]]) -> dict[str, float]:
    """Returns medians over the rounds of one engine's time divided by another's in the same round."""
    found = {}
    if {STOCK, OFF} <= taken.keys():
        found["outside_ratio"] = _ratio(taken[OFF], taken[STOCK], outside_s)
        if any(KERNELS in each.parts_s for each in taken[OFF]):
            found["host_ratio"] = _ratio(taken[OFF], taken[STOCK], host_s)
    for kind in (MISS, HIT, POOL):
        if {OFF, kind} <= taken.keys():
            found[f"{kind}_ratio"] = _ratio(taken[kind], taken[OFF], lambda run: run.process_s / run.steps)
            found[f"{kind}_wall_ratio"] = _ratio(taken[kind], taken[OFF], lambda run: run.wall_s / run.steps)
    return found


def _ratio(ours: Sequence[TimedSteps], base: Sequence[TimedSteps], of: Callable[[TimedSteps], float]) -> float:
    return round(median(of(one) / of(other) for one, other in zip(ours, base, strict=True)), 3)


def _ms(seconds) -> float:
    return round(1e3 * median(seconds), 3)


def tables(result: dict) -> list:
    """Returns a table of `rich` for each number of samples: engines as columns, figures and parts as rows, and the
    ratios as the caption.
    """
    from rich.table import Table

    found = []
    every = [(samples, of, "") for samples, of in result["samples"].items()]
    every += [(samples, of, ", vLLM's second runner") for samples, of in result.get("samples_v2", {}).items()]
    for samples, of, runner in every:
        kinds = [kind for kind in KINDS if kind in of]
        caption = ", ".join(f"{name} {value}" for name, value in of.items() if name not in KINDS)
        table = Table("milliseconds a step", *kinds, title=f"{samples} samples{runner}", caption=caption)
        for name in ("wall_ms", "process_ms", "outside_ms", "proposal_ms_per_step", "tokens", "drafted"):
            table.add_row(name, *(str(of[kind][name]) for kind in kinds))
        for part in sorted({part for kind in kinds for part in of[kind]["parts_ms"]}):
            table.add_row(f"  {part}", *(str(of[kind]["parts_ms"].get(part, "")) for kind in kinds))
        found.append(table)
    return found
