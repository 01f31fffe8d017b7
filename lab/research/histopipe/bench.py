"""Pipelines over many steps of a paper's workload: the gain of each part of HistoPipe (RhymeRL 6), beside its claims.

As in training, prompts repeat in epochs, each time in another order, which is the same for every arrangement. In the
stored order a worker would have the same prompts in every epoch, and the worker with the longest would delay a naive
pipeline each time. If training runs beside the rollout, half of all GPUs train; `sequential` trains on the GPUs that
generate. Invariant: the same scenario and seeds give the same bytes. Called by `tailrace bench pipeline`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from tailrace.lab.research.histopipe.batch import NO_DRAFTS, Drafts
from tailrace.lab.research.histopipe.policy import HistoPipeline
from tailrace.lab.research.histopipe.systems import run_pipeline
from tailrace.lab.simulator.acceptance import aimd_share
from tailrace.lab.simulator.hardware import MODELS, NETWORK_BYTES_S, SEND_SHARE, replica_model
from tailrace.lab.simulator.laws import draw_steps
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.types import Cluster, ReplicaModel, WorkloadGroup
from tailrace.policies.models.hashed_random import fraction

EPOCH_STEPS = 16
"""Number of steps until a prompt repeats: RhymeRL 7 takes 8 K prompts, and the scenario's 512 a step are assumed."""

PAST_EPOCHS = 2
"""Number of past epochs that HistoPipe knows: the last one ranks prompts, and the growth since the one before decides
which answers are outliers (RhymeRL 6.3).
"""

ROLLOUT_SHARE = 0.91
"""Share of rollout in a sequential step, for mathematics with 16 K tokens (RhymeRL 3.1). Training takes the rest on the
same GPUs, and half of the rest on twice as many (assumed: the best case for `sequential_all`).
"""

RANKING_GROUPS = 16
"""Maximum number of ranking groups, for mathematics (RhymeRL 7.2.3). There are at most half as many as workers."""

AMPLE = 64
"""Factor by which the KV memory is larger in the regime ample_kv: all answers of a worker fit."""

DRAFTED = "+drafts"


def steps_of(scenario: Scenario, seed: int, steps: int) -> list[tuple[WorkloadGroup, ...]]:
    """Returns the prompts of each step, shuffled within their epoch by a digest. Lengths drift from epoch to epoch, by
    the drift of EPOCH_STEPS steps, and not within one.
    """
    per_step, epochs = scenario.prompts.value, ceil(steps / EPOCH_STEPS)
    drift = scenario.lengths.drift.value * EPOCH_STEPS if scenario.lengths.drift else 0.0
    counts = per_step * EPOCH_STEPS, scenario.samples.value, epochs
    found = []
    for epoch, groups in enumerate(
        draw_steps(scenario.law(), *counts, drift, seed, PAST_EPOCHS, scenario.prompt_tokens.value)
    ):
        order = sorted(groups, key=lambda group, epoch=epoch: fraction(seed, f"{epoch}/{group.group_id}"))
        found += [tuple(order[n : n + per_step]) for n in range(0, len(order), per_step)]
    return found[:steps]


def history_drafts(scenario: Scenario, model: ReplicaModel) -> Drafts:
    """Returns the drafts of RhymeRL's window over the scenario's acceptance table, with the answers of its `epochs` as
    evidence.

    A draft token is right with chance p, so p / (1 - p) draft tokens are right between two wrong ones. This number over
    the verifications between two wrong ones, with windows of 2, 4, ... 32, is the gain of a verification in tokens.
    Drafts are on up to the largest batch at which they still increase tokens a second, by the step model at a mean
    context (5.4).
    """
    chances, law = scenario.acceptance.chances(), scenario.law()
    chance = chances.mean_chance(chances.evidence(0, scenario.epochs.value * scenario.samples.value))
    right = chance / (1 - chance) / aimd_verifications(chance)
    drafted, context = right / aimd_share(chance), scenario.prompt_tokens.value + law.mean() / 2

    def pays(running: int) -> bool:
        plain_s = model.step.seconds(running, running * context)
        return model.step.seconds(running * (1 + drafted), running * context) < (1 + right) * plain_s

    most = max((running for running in range(1, model.max_running + 1) if pays(running)), default=0)
    return Drafts(1 + right, drafted, most)


def aimd_verifications(chance: float, start: int = 2, step: int = 2, most: int = 32) -> float:
    """Returns the mean number of verifications from one wrong draft token to the next, with the windows of
    `aimd_share`.
    """
    reached, verifications = 1.0, 0.0
    for window in range(start, most, step):
        verifications += reached
        reached *= chance**window
    return verifications + reached / (1 - chance**most)


def measure(scenario: Scenario, steps: int, seeds: int, say: Callable[[str], None] = lambda text: None) -> dict:
    """Returns the figures of each arrangement without and with history drafts, [mean, min, max] over the seeds.

    bubbles: share of the rollout workers' time without work. migrated: share of answers that moved. ratio,
    ratio_equal_gpus and ratio_overlapped: how many times as fast as sequential, sequential_all and overlapped without
    drafts. Only `sequential` leaves half of the GPUs out.

    `regimes` show why the first tier alone can lose. If a worker has many answers, KV memory limits how many run, and
    the context read sets the time of a step. The worker's time then grows with the square of the lengths. The worker
    with the longest prompts takes many times the mean, and its turn with the shortest ones does not make up for that.
    With ample_kv the first tier loses less. With few_answers, one prompt a worker, a worker takes little longer than
    its longest answer. Long answers together then cost nothing, and the first tier gains.
    """
    model = replica_model(scenario.gpu.value, scenario.model.value, scenario.gpus_per_replica.value)
    cluster, drafts = Cluster(model, scenario.replicas, scenario.replicas_per_node), history_drafts(scenario, model)
    ample = replace(cluster, replica=replace(model, kv_capacity_tokens=AMPLE * model.kv_capacity_tokens))
    prompts = scenario.prompts.scaled(cluster.replicas, cluster.replicas / scenario.prompts.value)
    few = scenario.model_copy(update={"prompts": prompts})
    load_s = weights_s(scenario)
    found, regimes = [], {"ample_kv": [], "few_answers": []}
    for seed in range(seeds):
        drawn = steps_of(scenario, seed, steps)
        found.append(play(drawn, cluster, load_s, (NO_DRAFTS, drafts)))
        regimes["ample_kv"].append(play(drawn, ample, load_s, (NO_DRAFTS,)))
        regimes["few_answers"].append(play(steps_of(few, seed, steps), cluster, load_s, (NO_DRAFTS,)))
        say(f"seed {seed}: " + ", ".join(f"{name} {row['ratio_overlapped']:.2f}" for name, row in found[-1].items()))
    return {
        "workload": scenario.name,
        "steps": steps,
        "seeds": seeds,
        "gpus": {"rollout": scenario.gpus.value, "training": scenario.gpus.value},
        "answers_per_worker": scenario.prompts.value * scenario.samples.value // scenario.replicas,
        "drafts": drafts._asdict(),
        "runs": _spreads(found),
        "regimes": {name: _spreads(rows) for name, rows in regimes.items()},
        "claims": _claims(scenario, found, drafts),
    }


def weights_s(scenario: Scenario) -> float:
    """Returns the seconds until a worker has new weights, at the rate at which the network brings them to its GPUs."""
    model = MODELS[scenario.model.value]
    return model.parameters * model.parameter_bytes / (scenario.gpus_per_replica.value * NETWORK_BYTES_S * SEND_SHARE)


def play(
    steps: Sequence[tuple[WorkloadGroup, ...]], cluster: Cluster, weights_s: float, draftings: Sequence[Drafts]
) -> dict[str, dict]:
    """Returns the figures of every arrangement on the same steps; those with drafts are called NAME+drafts.

    sequential, sequential_all: rollout and training in turn, on half of the GPUs or on all. overlapped: a barrier after
    each step, training alongside the next rollout (the baseline of RhymeRL 7.1). naive: each worker continues to the
    next step by itself, prompts in the order given. alternating: HistoPipe's first tier, long prompts after short ones;
    outliers move. tiers: both of its tiers.
    """
    every = replace(cluster, replicas=2 * cluster.replicas)
    knobs = HistoPipeline(ranking_groups=min(RANKING_GROUPS, max(cluster.replicas // 2, 1)))
    train_s, rows = None, {}
    for drafts in draftings:

        def run(mode: str, train_s: float, on: Cluster = cluster, drafts: Drafts = drafts) -> dict:
            return run_pipeline(steps, on, mode, train_s=train_s, weights_s=weights_s, drafts=drafts, policy=knobs)

        overlapped = run("sequential", 0.0)
        if train_s is None:
            train_s = overlapped["total_s"] / len(steps) * (1 / ROLLOUT_SHARE - 1)
        overlapped["total_s"] += train_s  # training is shorter than any rollout, so only the last one adds time
        runs = {
            "sequential": run("sequential", train_s),
            "sequential_all": run("sequential", train_s / 2, every),
            "overlapped": overlapped,
            **{mode: run(mode, train_s) for mode in ("naive", "alternating", "tiers")},
        }
        rows |= {name + (DRAFTED if drafts is not NO_DRAFTS else ""): row for name, row in runs.items()}
    return {name: _figures(row, rows) for name, row in rows.items()}


def _figures(run: dict, rows: dict[str, dict]) -> dict:
    return {
        "total_s": run["total_s"],
        "bubbles": run["bubbles"],
        "migrated": sum(run["migrated"].values()),
        "stale_turns": run["staleness"]["share"],
        "ratio": rows["sequential"]["total_s"] / run["total_s"],
        "ratio_equal_gpus": rows["sequential_all"]["total_s"] / run["total_s"],
        "ratio_overlapped": rows["overlapped"]["total_s"] / run["total_s"],
    }


def _claims(scenario: Scenario, runs: list[dict], drafts: Drafts) -> dict[str, dict]:
    """Returns RhymeRL's claims beside what is found here; empty for workloads of other papers."""

    def gain(slow: str, fast: str) -> list[float]:
        return _spread([run[slow]["total_s"] / run[fast]["total_s"] for run in runs])

    found = {
        "pipeline_gain": gain("overlapped", "alternating"),
        "two_tier_gain": gain("alternating", "tiers"),
        "history_drafts_gain": gain("tiers", "tiers" + DRAFTED),
        "throughput_ratio": gain("overlapped", "tiers" + DRAFTED),
        "accepted_share": _spread([(drafts.tokens_per_step - 1) / drafts.drafted]),
        "migrated_share": _spread([run["tiers"]["migrated"] for run in runs]),
        "idle_share": _spread([run["overlapped"]["bubbles"] for run in runs]),
    }
    if "pipeline_gain" not in scenario.claims:
        return {}
    return {name: {"claimed": list(scenario.claims[name].value), "found": spread} for name, spread in found.items()}


def _spreads(runs: list[dict[str, dict]]) -> dict[str, dict[str, list[float]]]:
    """Returns [mean, min, max] over the runs, for every figure of every arrangement."""
    return {name: {key: _spread([run[name][key] for run in runs]) for key in runs[0][name]} for name in runs[0]}


def _spread(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in (sum(values) / len(values), min(values), max(values))]
