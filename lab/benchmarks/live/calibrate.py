"""The simulator against the service: one replayed workload, rolled out live and simulated, under three policies.

The model of the replicas comes from probes alone (`probes`): made-up rollouts in the same service, before, between and
after the predicted ones. The results of all probes are pooled, since a single one is off by a tenth or more on a shared
machine. The policies take turns. A turn is simulated at the speed that the probes before and after it measured, so that
a machine that slows down slows both sides. Nothing is fitted to the predicted runs. Figures are medians over the turns,
of live and of simulated runs. Called by `tailrace bench calibrate`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import mean, median

from tailrace.app.calls.client import RolloutClient
from tailrace.app.cluster import service
from tailrace.app.config import ServeFile
from tailrace.app.summary import quantile, summarise
from tailrace.deployments.messages.rollout import PromptGroup, RolloutBatch
from tailrace.lab.benchmarks.live.medians import middle
from tailrace.lab.benchmarks.live.probes import Probes, engines, pooled, stepped
from tailrace.lab.benchmarks.live.static_baseline import KEPT
from tailrace.lab.replay.recorded import forced
from tailrace.lab.replay.speculation import replaying
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.types import Cluster, ReplicaModel, SimulatedRun, Workload, WorkloadGroup
from tailrace.policies.families.registry import Policies

BATCH = "calibrate"

REPORTED_S = 1.5
"""Seconds after which the coordinator has received all counts of its replicas: three polls."""


def runs(chunk_tokens: int, block_tokens: int = 1) -> dict[str, Policies]:
    """Returns the policies by name: static groups in one piece, Seer's ordering in chunks, and the same with drafts."""
    whole = {"type": "fixed", "chunk_tokens": None}
    chunking = {"type": "fixed", "chunk_tokens": chunk_tokens, "block_tokens": block_tokens}
    chunks = {"ordering": "seer", "placement": "cost_aware", "chunking": chunking}
    return {
        "group_static": Policies(ordering="group_static", placement="pinned", chunking=whole, drafting="off"),
        "seer": Policies(**chunks, drafting="off"),
        "seer_goodput": Policies(**chunks, drafting="goodput"),
    }


def batch_id(name: str, turn: int) -> str:
    """Returns the batch id of a run. Each run has a separate one, so that no run drafts from the answers of another."""
    return f"{BATCH}-{name}-{turn}"


def workload(groups: Sequence[PromptGroup], batch: str = BATCH) -> Workload:
    """Returns the workload of groups that replay token ids. A sample's length includes its end-of-sequence token."""
    known = (
        WorkloadGroup(
            f"{batch}/{group.prompt_id}", len(group.token_ids), tuple(len(ids) + 1 for ids in group.forced_token_ids)
        )
        for group in groups
    )
    return Workload(batch, groups[0].max_tokens, (tuple(known),))


def slowness(ladder: Mapping, profile: Mapping) -> float:
    """Returns the measured time of a ladder's steps over the time by the profile's fit: the median over the rungs."""
    return median(beside_fit(ladder["steps"], profile["fit"]))


def beside_fit(steps: Sequence[Mapping], line: Mapping[str, float]) -> list[float]:
    """Returns, for each step, its measured time over its time by the fit."""
    context_ms = line["per_context_token_us"] / 1e3
    return [
        step["step_ms"]
        / (
            line["base_ms"]
            + step["chunks"] * ((1 + step["draft_tokens"]) * line["per_token_ms"] + context_ms * step["context_tokens"])
        )
        for step in steps
    ]


def slowed(model: ReplicaModel, times: float) -> ReplicaModel:
    """Returns a model whose steps, prefills, fetches, hand-overs and joins take `times` times as long."""
    step = model.step
    return replace(
        model,
        step=replace(step, base_s=step.base_s * times, token_s=step.token_s * times, context_s=step.context_s * times),
        prefill_tokens_s=model.prefill_tokens_s / times,
        fetch_tokens_s=model.fetch_tokens_s / times,
        fetch_base_s=model.fetch_base_s * times,
        handover_s=model.handover_s * times,
        join_s=model.join_s * times,
    )


def simulated(
    groups: Sequence[PromptGroup],
    models: Mapping[str, ReplicaModel],
    replicas: int,
    named: Mapping[str, Policies],
    times: Sequence[float],
) -> dict[str, dict]:
    """Returns the simulated figures by name: medians over the turns, each slowed by its entry of `times`.

    Drafts are proposed and accepted as in the live runs.
    """
    found = {}
    for name, policies in named.items():
        all_of = []
        for turn, one in enumerate(times):
            model, batch = slowed(models[name], one), batch_id(name, turn)
            work, recorded = workload(groups, batch), forced(groups, batch)
            with replaying(work, recorded, policies.drafting, model.step) as speculation:
                cluster = Cluster(model, replicas, replicas)
                all_of.append(figures(simulate(work, cluster, policies, speculation=speculation)))
        found[name] = {key: median(one[key] for one in all_of) for key in all_of[0]}
    return found


def figures(run: SimulatedRun) -> dict:
    """Returns the figures of a simulated run, defined as in `app.summary` for a live run."""
    ends = sorted(one.ended_s for one in run.ended)
    return {
        "makespan_s": round(run.makespan_s, 3),
        "tail_s": round(run.makespan_s - quantile(ends, 0.9), 3),
        "mean_sample_s": round(mean(ends), 3),
        "moved_samples": sum(one.moves > 0 for one in run.ended),
    }


def verdict(live: Mapping[str, Mapping], modelled: Mapping[str, Mapping]) -> dict:
    """Returns the relative errors of the simulation, positive where the simulated run takes longer.

    `same_ranking`: whether the simulation ranks the makespans of the policies as the live runs do.
    """
    errors = {
        name: {what: relative(modelled[name][f"{what}_s"], run[f"{what}_s"]) for what in ("makespan", "tail")}
        for name, run in live.items()
    }
    ranking = {
        side: sorted(found, key=lambda name: found[name]["makespan_s"])
        for side, found in (("live", live), ("simulated", modelled))
    }
    return {"error": errors, "same_ranking": ranking["live"] == ranking["simulated"], "ranking": ranking}


def relative(modelled: float, live: float) -> float | None:
    return round(modelled / live - 1, 4) if live else None


def measure(
    file: ServeFile,
    groups: Sequence[PromptGroup],
    chunk_tokens: int,
    repeats: int,
    profile: dict | None,
    say: Callable[[str], None],
) -> dict:
    """Returns the verdict and the figures behind it. `profile`: one of `tailrace profile`, in place of the ladders."""
    replicas = file.application.args.replicas.max
    named = runs(chunk_tokens, file.application.args.engine.block_tokens)
    say(f"starting {replicas} replicas")
    with service(file, None) as client:
        live, found = asyncio.run(_roll_all(client, replicas, named, groups, repeats, say))
    profile = profile or pooled(found.ladders)
    plain, drafting = found.models(profile)
    models = {name: drafting if policies.drafting.max_draft_tokens else plain for name, policies in named.items()}
    speeds = [slowness(ladder, profile) for ladder in found.ladders]
    around = [mean(pair) for pair in pairwise(speeds)]  # each turn
    modelled = simulated(groups, models, replicas, named, around)
    return verdict(live, modelled) | {
        "live": live,
        "simulated": modelled,
        "profile": {key: profile[key] for key in ("fit", "prefill_ms")}
        | {"fit_with_drafts": found.drafting(profile)["fit"]},
        "slowness": [round(speed, 4) for speed in speeds],
        "handovers_s": found.handovers,
        "busy_handovers_s": found.busy,
        "alone_shares": found.alone,
        "replica": asdict(models["seer"]),
        "tokens": sum(len(ids) + 1 for group in groups for ids in group.forced_token_ids),
        "repeats": repeats,
    }


async def _roll_all(client: RolloutClient, replicas: int, named, groups, repeats: int, say) -> tuple[dict, Probes]:
    """Runs the policies in turns, with probes before, between and after the turns. Returns figures and probes."""
    probes, rolled = Probes(client, replicas, say, await engines(client)), {name: [] for name in named}
    await probes.look()
    for turn in range(repeats):
        for name, policies in named.items():
            rolled[name].append(run := await _roll(client, batch_id(name, turn), policies, groups))
            done = ", ".join(f"{key} {run[key]}" for key in ("makespan_s", "tail_s", "steps", "step_ms"))
            say(f"{name}, {turn + 1} of {repeats}: {done}")
        await probes.look()
    return {name: middle(all_of) for name, all_of in rolled.items()}, probes


async def _roll(client: RolloutClient, name: str, policies: Policies, groups) -> dict:
    """Returns the figures of one run, with the engine steps of all replicas."""
    await client.reset_caches()
    await client.forget_history()
    await client.set_policies(policies)
    before = await stepped(client)
    summary = summarise([group async for group in client.rollout(RolloutBatch(batch_id=name, groups=tuple(groups)))])
    await asyncio.sleep(REPORTED_S)
    steps, step_s = (now - then for now, then in zip(await stepped(client), before, strict=True))
    return {key: summary[key] for key in KEPT} | {"steps": steps, "step_ms": round(1e3 * step_s / steps, 3)}
