"""Replayed rollouts on real replicas under every draft budget, against no drafts and against vLLM's own drafters.

Every run replays the same tokens with the same scheduling on two replicas: runs differ in their drafts alone. Runs with
the same engine settings share a service and take turns, so that a machine that slows down slows all of them. History
is deleted before each run, since it would hold the answers that the run replays.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile, with_engine
from tailrace.app.files.output_file import OutputFile
from tailrace.app.summary import summarise
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.deployments.messages.status import ServiceSnapshot
from tailrace.lab.verification.runs import GROUP, of_vllm
from tailrace.lab.verification.services import Engine
from tailrace.policies.families.registry import Policies

LOOK_S = 0.25
TAIL_RUNNING = 2
"""Maximum number of samples that a replica runs in the tail. In the tail of this benchmark no sample waits."""

KEPT = ("makespan_s", "tail_s", "tokens_per_s", "mean_sample_s", "tokens", "drafted_tokens", "accepted_share")

FIXED = (2, 4, 8)
BUDGETS: dict[str, object] = {
    "off": "off",
    **{f"fixed_{tokens}": {"type": "fixed", "tokens": tokens} for tokens in FIXED},
    **{name: name for name in ("aimd", "length_class", "closed_form", "concurrency", "goodput")},
}
ALL = {"type": "fixed", "tokens": 16}
"""Drafting policy for vLLM's own drafters: all drafts that they propose are verified, as in vLLM."""

OF_VLLM: dict[str, Engine] = {
    "ngram": of_vllm(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2),
    "suffix": of_vllm(method="suffix", num_speculative_tokens=16),
}


class SpeculationLook:
    """One look at a running service. `at_s`: seconds since the rollout began. `in_tail`: whether it is in its tail.
    `work`: work counts so far, summed over replicas.
    """

    def __init__(self, at_s: float, status: ServiceSnapshot):
        self.at_s = at_s
        self.in_tail = not status.waiting and 0 < max((r.running for r in status.replicas), default=0) <= TAIL_RUNNING
        self.work: dict[str, int] = {}
        for replica in status.replicas:
            for what, count in replica.work.items():
                self.work[what] = self.work.get(what, 0) + count


def measure(
    file: ServeFile, groups: tuple[PromptGroup, ...], repeats: int, say: Callable[[str], None], plot: OutputFile | None
) -> dict:
    """Returns, for each run, the repeat with the shortest makespan, and `ratios`. `plot`: file for the picture."""
    runs: dict[str, dict] = {}
    series: dict[str, list[SpeculationLook]] = {}
    for engine, budgets in [(GROUP, BUDGETS), *((engine, {name: ALL}) for name, engine in OF_VLLM.items())]:
        say(f"starting two replicas for {', '.join(budgets)}")
        with service(with_engine(file, dict(engine)), None) as client:
            for turn in range(repeats):
                for name, budget in budgets.items():
                    policies = file.application.policies
                    named = Policies(**(policies.model_dump() | {"drafting": budget}))
                    result, looks = asyncio.run(_roll(client, f"{name}-{turn}", named, groups))
                    say(f"{name}: {result}")
                    if name not in runs or result["makespan_s"] < runs[name]["makespan_s"]:
                        runs[name], series[name] = result, looks
    if plot is not None:
        from tailrace.lab.benchmarks.live.pictures import acceptance_over_time

        acceptance_over_time(plot, runs, series)
    return {"runs": runs, **ratios(runs), "repeats": repeats}


def ratios(runs: dict[str, dict]) -> dict:
    """Returns `goodput` against the other runs: above 1, `goodput` is faster.

    Ratios are of makespans; `tail_speedup` is `goodput` against no drafts, of tokens a second in the tail.
    """
    ours = runs["goodput"]
    fixed = min((runs[f"fixed_{tokens}"] for tokens in FIXED), key=lambda run: run["makespan_s"])
    tail = (ours["tail_tokens_per_s"], runs["off"]["tail_tokens_per_s"])
    return {
        "speedup": {name: round(run["makespan_s"] / ours["makespan_s"], 3) for name, run in runs.items()},
        "goodput_to_best_fixed": round(fixed["makespan_s"] / ours["makespan_s"], 3),
        "tail_speedup": round(tail[0] / tail[1], 3) if all(tail) else None,
    }


async def _roll(client: RolloutClient, name: str, policies: Policies, groups) -> tuple[dict, list[SpeculationLook]]:
    await client.reset_caches()
    await client.forget_history()
    await client.set_policies(policies)
    await asyncio.sleep(4 * LOOK_S)  # until the reports of replicas hold all work of the last run
    batch = RolloutBatch(batch_id=f"bench-{name}", groups=groups)
    began_s, looks = time.monotonic(), []

    async def look() -> None:
        while True:
            looks.append(SpeculationLook(time.monotonic() - began_s, await client.status()))
            await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        done = [group async for group in client.rollout(batch)]
        await asyncio.sleep(4 * LOOK_S)
    finally:
        looking.cancel()
    if looking.done():  # it ends by an error alone
        looking.result()
    summary = summarise(done)
    return {key: summary[key] for key in KEPT} | shares(looks), looks


def shares(looks: list[SpeculationLook]) -> dict:
    """Returns tokens a verification, the share of time spent on drafts, and tokens a second in the tail.

    A figure is None if the looks do not show it.
    """
    did = _between(looks[0], looks[-1])
    busy_us = did.get("step_us", 0) + did.get("draft_us", 0)
    tail = [(a, b) for a, b in pairwise(looks) if a.in_tail and b.in_tail]
    tail_s = sum(b.at_s - a.at_s for a, b in tail)
    tail_tokens = sum(_between(a, b)["tokens"] for a, b in tail)
    return {
        "acceptance_length": round(did["tokens"] / did["verifications"], 3) if did.get("verifications") else None,
        "draft_share": round(did.get("draft_us", 0) / busy_us, 4) if busy_us else None,
        "tail_tokens_per_s": round(tail_tokens / tail_s, 2) if tail_s else None,
    }


def _between(first: SpeculationLook, last: SpeculationLook) -> dict[str, int]:
    return {what: last.work[what] - first.work.get(what, 0) for what in last.work}
