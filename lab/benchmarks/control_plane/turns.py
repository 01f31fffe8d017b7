"""Benchmark of turns with tools on a modelled cluster: held samples, against each turn as a new request.

A held sample stays between its turns. Both run with the same policies, on the same draws of the workload. The simulated
shell drives the real core.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tailrace.lab.simulator.report import spread, summary
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.systems import Setup, system
from tailrace.lab.simulator.types import SimulatedRun

SYSTEMS = {"held": "tailrace_near", "requests": "tailrace_requests"}


def measure(scenario: Scenario, seeds: int, drafting: str, say: Callable[[str], None]) -> dict:
    """Returns the figures of all runs, and two of them as [mean, min, max] over the seeds: `makespan_ratio`, makespan
    with requests over that with held samples; and `recomputed_share` of each system.
    """
    runs: dict[str, list[dict]] = {name: [] for name in SYSTEMS}
    for seed in range(seeds):
        setup = Setup.of(scenario, seed)
        for name, of in SYSTEMS.items():
            chosen = system(of)
            chosen = replace(chosen, policies=chosen.policies | {"drafting": drafting})
            runs[name].append(figures(setup.run(of, chosen, seed)))
            shown = {key: runs[name][-1][key] for key in ("makespan_s", "recomputed_share")}
            say(f"seed {seed}, {name}: {shown}")
    pairs = list(zip(runs["requests"], runs["held"], strict=True))
    return {
        "workload": scenario.name,
        "replicas": scenario.replicas,
        "drafting": drafting,
        "samples": scenario.prompts.value * scenario.samples.value,
        "makespan_ratio": _spread([one["makespan_s"] / held["makespan_s"] for one, held in pairs]),
        "recomputed_share": {name: _spread([one["recomputed_share"] for one in of]) for name, of in runs.items()},
        "runs": runs,
    }


def figures(run: SimulatedRun) -> dict:
    """Returns the figures of one run. `recomputed_share`: tokens of context that were computed again, over those that
    later turns began with and that had been computed before; None if there are none.
    """
    of_all = summary(run)
    returned = sum(ended.returned_tokens for ended in run.ended)
    kept = ("makespan_s", "tail_s", "tokens", "mean_sample_s", "moves", "acceptance_length", "recomputed_tokens")
    return {key: of_all[key] for key in kept} | {
        "turns": sum(ended.turns for ended in run.ended),
        "returned_tokens": returned,
        "recomputed_share": round(of_all["recomputed_tokens"] / returned, 6) if returned else None,
    }


def _spread(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in spread(values)]
