"""The simulator against the service: one replayed workload, rolled out live and simulated, under three policies.

The model knows this machine from probes alone (`probes`): made-up rollouts in the same service, before, between and
after the predicted ones, so that a machine that slows down slows both. Nothing is fitted to what is predicted. Live
figures are medians of the repeats; a simulation needs none. Called by `python -m app bench calibrate`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean, median

from app.bench.live import KEPT
from app.bench.probes import climb, engines, hand_over, model_of
from app.bench.stepcost import fit
from app.client import RolloutClient
from app.cluster import service
from app.config import ServeFile
from app.simulator.host import simulate
from app.simulator.types import Cluster, Group, ReplicaModel, Run, Workload
from app.summary import quantile, summarise
from deployments.messages import PromptGroup, RolloutBatch
from policies.bundle import Policies

BATCH = "calibrate"


def runs(chunk_tokens: int) -> dict[str, Policies]:
    """Whole groups in one piece; Seer in chunks; most expected tokens left first, in chunks. None of them drafts."""
    whole = {"type": "fixed", "chunk_tokens": None}
    chunks = {"placement": "cost_aware", "chunking": {"type": "fixed", "chunk_tokens": chunk_tokens}, "drafting": "off"}
    return {
        "group_static": Policies(ordering="group_static", placement="pinned", chunking=whole, drafting="off"),
        "seer": Policies(ordering="seer", **chunks),
        "remaining_first": Policies(ordering="remaining_first", **chunks),
    }


def workload(groups: Sequence[PromptGroup]) -> Workload:
    """Of groups that replay token ids: their true lengths, each with the end-of-sequence token that follows."""
    known = (
        Group(f"{BATCH}/{group.prompt_id}", len(group.token_ids), tuple(len(ids) + 1 for ids in group.forced_token_ids))
        for group in groups
    )
    return Workload(BATCH, groups[0].max_tokens, (tuple(known),))


def pooled(ladders: Sequence[Mapping]) -> dict:
    """One profile of several ladders, as `app profile` writes it; prompts take their mean over the ladders."""
    steps = [step for ladder in ladders for step in ladder["steps"]]
    by_tokens: dict[int, list[float]] = {}
    for one in (one for ladder in ladders for one in ladder["prefill"]):
        by_tokens.setdefault(one["tokens"], []).append(one["prefill_ms"])
    return {"steps": steps, "prefill_ms": {n: round(mean(took), 3) for n, took in by_tokens.items()}, "fit": fit(steps)}


def simulated(work: Workload, model: ReplicaModel, replicas: int, named: Mapping[str, Policies]) -> dict[str, dict]:
    return {name: figures(simulate(work, Cluster(model, replicas, replicas), how)) for name, how in named.items()}


def figures(run: Run) -> dict:
    """As `app.summary` counts them for a live run."""
    ends = sorted(one.ended_s for one in run.ended)
    return {
        "makespan_s": round(run.makespan_s, 3),
        "tail_s": round(run.makespan_s - quantile(ends, 0.9), 3),
        "mean_sample_s": round(mean(ends), 3),
        "moved_samples": sum(one.moves > 0 for one in run.ended),
    }


def middle(repeats: Sequence[Mapping]) -> dict:
    """Medians of each figure, and all makespans and tails, in order."""
    found = {key: median(one[key] for one in repeats) for key in KEPT}
    return found | {f"all_{key}": [one[key] for one in repeats] for key in ("makespan_s", "tail_s")}


def verdict(live: Mapping[str, Mapping], modelled: Mapping[str, Mapping]) -> dict:
    """Relative errors of what was simulated, positive where it takes longer; and whether it ranks makespans alike."""
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
    """`profile`: one of `app profile`, in place of the probes' ladder."""
    replicas, named, work = file.application.of("Engine").num_replicas, runs(chunk_tokens), workload(groups)
    say(f"starting {replicas} replicas")
    with service(file, None) as client:
        live, ladders, handovers, told = asyncio.run(_roll_all(client, replicas, named, groups, repeats, say))
    profile = profile or pooled(ladders)
    model = model_of(profile, *told, median(handovers))
    modelled = simulated(work, model, replicas, named)
    return verdict(live, modelled) | {
        "live": live,
        "simulated": modelled,
        "profile": {key: profile[key] for key in ("fit", "prefill_ms")},
        "ladders": [fit(ladder["steps"]) for ladder in ladders],
        "handovers_s": handovers,
        "replica": asdict(model),
        "tokens": sum(sum(group.lengths) for group in work.steps[0]),
        "repeats": repeats,
    }


async def _roll_all(client: RolloutClient, replicas: int, named, groups, repeats: int, say):
    """Probes, then the policies in turn with probes after each turn."""
    told = await engines(client)
    ladders, handovers, rolled = [], [], {name: [] for name in named}

    async def probe(turn: int) -> None:
        ladders.append(await climb(client, f"ladder-{turn}", replicas, told[0][0].max_running))
        handovers.append(await hand_over(client, f"hand-over-{turn}", replicas))
        say(f"probes: {fit(ladders[-1]['steps'])}, hand-over {handovers[-1]:.3f} s")

    await probe(0)
    for turn in range(1, repeats + 1):
        for name, policies in named.items():
            await client.reset_caches()
            await client.forget_history()
            await client.set_policies(policies)
            # Batches of one name are in flight one after the other; digests of sample ids are then the simulation's.
            batch = RolloutBatch(batch_id=BATCH, groups=tuple(groups))
            summary = summarise([group async for group in client.rollout(batch)])
            rolled[name].append(summary)
            say(f"{name}: makespan {summary['makespan_s']} s, tail {summary['tail_s']} s")
        await probe(turn)
    return {name: middle(all_of) for name, all_of in rolled.items()}, ladders, handovers, told
