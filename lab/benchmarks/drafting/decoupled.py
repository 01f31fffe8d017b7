"""A draft model beside the engine that verifies: coupled and decoupled, with the samples' own noise and other noise.

The two engines run in separate processes on separate cores and connect directly, without a service. Each run is
reported with the planner's prediction, which uses step times and acceptance measured in the same benchmark.
Called by `tailrace bench decoupled`.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from tailrace.app.errors import Failed
from tailrace.deployments.drafter.drafter_config import DrafterConfig
from tailrace.deployments.messages.chunk import ChunkRequest, sample_key
from tailrace.deployments.messages.context import GroupRef
from tailrace.deployments.messages.drafts import DraftPlan
from tailrace.deployments.messages.rollout import SamplingParams
from tailrace.deployments.vllm_exact.engine_config import EngineConfig
from tailrace.lab.benchmarks.drafting import drafter_pair
from tailrace.policies.families.drafting import FixedBudget
from tailrace.policies.models.spec_cost_model import DrafterCost, VerifierCost, coupled_tokens_s, decoupled_tokens_s
from tailrace.policies.models.specactor_planner import Decoupled
from tailrace.policies.protocol.actions import DraftMode

SETTLED_S = 0.5
"""Seconds after which a drafter's counts include the end of a run: the drafter reads it within its idle wait."""


def measure(
    engine: EngineConfig, drafter: DrafterConfig, prompts: list[np.ndarray], tokens: int, say: Callable[[str], None]
) -> dict:
    """Runs one sample of each prompt (int32), all at once, at temperature 1.

    Returns `runs` by mode and noise, plain decoding first; `fits`: seconds of both engines' steps; `plan`: the
    planner's choice by Algorithm 1. Raises Failed if an engine's process does not start, or dies.
    """
    try:
        with drafter_pair.process(drafter_pair.draft, drafter.engine(engine)) as drafting:
            say(f"starting {drafter.model}")
            address, runs = drafting.submit(drafter_pair.address).result(), {}
            for shared in (True, False):
                say(f"starting {engine.model}, {'shared' if shared else 'other'} noise")
                config = drafter.model_copy(update={"shared_noise": shared})
                with drafter_pair.process(drafter_pair.verify, engine, config, address) as verifying:
                    if shared:
                        runs["plain"] = _plain(verifying, prompts, tokens, say)
                    for mode in ("coupled", "decoupled"):
                        name = f"{mode}{'' if shared else ', other noise'}"
                        way = DraftMode(drafter.window, mode == "coupled")
                        runs[name] = _run(name, verifying, drafting, prompts, tokens, way)
                        say(f"{name}: {runs[name]}")
                    costs = (
                        drafting.submit(drafter_pair.drafter_cost).result(),
                        verifying.submit(drafter_pair.verifier_cost).result(),
                    )
    except BrokenProcessPool:
        raise Failed("an engine's process did not start, or died; see what it wrote above") from None
    return {"window": drafter.window, "samples": len(prompts)} | _beside(runs, costs, drafter.window, len(prompts))


def _plain(verifying: ProcessPoolExecutor, prompts: list[np.ndarray], tokens: int, say: Callable[[str], None]) -> dict:
    verifying.submit(drafter_pair.roll, chunks("warm-up", prompts, 8, None)).result()
    rolled = verifying.submit(drafter_pair.roll, chunks("plain", prompts, tokens, None)).result()
    say(f"plain: {rolled}")
    return rolled


def _run(name: str, verifying, drafting, prompts: list[np.ndarray], tokens: int, way: DraftMode) -> dict:
    """Runs the prompts in this mode. Returns the engine's figures, and those that the drafter counted meanwhile."""
    before = Counter(drafting.submit(drafter_pair.counts).result())
    rolled = verifying.submit(drafter_pair.roll, chunks(name, prompts, tokens, way)).result()
    seen = Counter(drafting.submit(drafter_pair.counts, SETTLED_S).result())
    seen.subtract(before)
    wasted = {int(key.partition(".")[2]): n for key, n in seen.items() if key.startswith("wasted.") and n}
    tested = seen["accepted"] + seen["rejections"]
    return rolled | {
        "acceptance": round(seen["accepted"] / max(1, tested), 4),
        "drafted_by_model": seen["drafted"],
        "rejections": seen["rejections"],
        "mean_wasted": round(seen["wasted"] / max(1, seen["rejections"]), 2),
        "most_wasted": max(wasted, default=0),
        "may_waste": (1 if way.coupled else 2) * way.window - 1,
    }


def _beside(runs: dict[str, dict], costs: tuple, window: int, samples: int) -> dict:
    """Adds the planner's prediction to each run, by the fits of both engines and the run's own acceptance.

    Returns the runs, the fits and the plan.
    """
    (base_d, sample_d), (base_v, token_v) = (affine(*cost) for cost in costs)
    drafter, verifier = DrafterCost(1, sample_d, base_d), VerifierCost(1, 0.0, token_v, base_v)
    for name, run in runs.items():
        if name == "plain":
            predicted = 1 / verifier.seconds(samples, 0)
        else:
            rate = coupled_tokens_s if name.startswith("coupled") else decoupled_tokens_s
            predicted = rate(run["acceptance"], drafter, verifier, samples, window)
        run["predicted_tokens_s"] = round(predicted, 2)
        run["error"] = round(predicted / run["tokens_s"] - 1, 3)
    p = runs["decoupled"]["acceptance"]
    plan = Decoupled(max_window=16).plan(samples, 2, p, [drafter], [verifier])
    fits = {"drafter": {"base_s": base_d, "sample_s": sample_d}, "verifier": {"base_s": base_v, "token_s": token_v}}
    best = {"drafts": plan.drafter is not None, "window": plan.window, "tokens_s": round(plan.tokens_s, 2)}
    return {
        "runs": runs,
        "same_tokens": len({run.pop("digest") for run in runs.values()}) == 1,
        "fits": {name: {key: round(value, 6) for key, value in fit.items()} for name, fit in fits.items()},
        "plan": best | {"reason": plan.reason},
    }


def affine(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> tuple[float, float]:
    """Returns (base, each) of seconds = base + each * size: least squares of relative errors, neither below 0."""
    x, y = np.array(sizes), np.array(seconds)
    each, base = np.polyfit(x, y, 1, w=1 / y)
    return (max(0.0, float(base)), max(0.0, float(each)))


def chunks(name: str, prompts: list[np.ndarray], tokens: int, way: DraftMode | None) -> list[ChunkRequest]:
    """Returns one sample of each prompt, the same samples for every name. `way` None: plain decoding."""
    made = []
    for index, prompt in enumerate(prompts):
        policy = way and FixedBudget(tokens=way.window)
        plan = way and DraftPlan(
            group=GroupRef(f"{name}/{index}", str(index)),
            sample_index=0,
            epoch=0,
            expected_tokens=tokens,
            class_starts=(0, 0),
            policy=policy,
            way=way,
        )
        key = sample_key(0, 0, str(index), 0)
        made.append(
            ChunkRequest(
                chunk_id=f"{name}/{index}",
                sample_key=key,
                token_ids=prompt,
                prompt_tokens=len(prompt),
                max_tokens=tokens,
                sampling=SamplingParams(),
                weights_version=0,
                draft=plan,
            )
        )
    return made
