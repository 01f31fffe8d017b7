"""One simulated training: a mode on a scenario's cluster for some steps, and its figures.

Every mode has the same GPUs: all of the scenario's. If training has separate GPUs, `train_share` of them trains. Called
by `tailrace simulate-training` and by tests. Invariant: the same arguments give the same figures.
"""

from collections.abc import Callable
from itertools import chain

from tailrace.lab.simulated_training.busy_times import covered_s
from tailrace.lab.simulated_training.figures import StepCosts, TrainingFigures
from tailrace.lab.simulated_training.host import TrainingHost
from tailrace.lab.simulated_training.learner import trained_tokens
from tailrace.lab.simulated_training.modes import TrainingMode
from tailrace.lab.simulated_training.steps import training_workload
from tailrace.lab.simulator.fleet import ModelledFleet
from tailrace.lab.simulator.hardware import replica_model
from tailrace.lab.simulator.scenario import Scenario
from tailrace.lab.simulator.speculation import by_policy
from tailrace.lab.simulator.systems import Sees
from tailrace.lab.simulator.types import Cluster
from tailrace.policies.families.histo_pipe import HistoPipe
from tailrace.policies.families.kv_on_update import finishes
from tailrace.policies.families.registry import Policies

WARM_UP = 2
"""Number of first steps that are not counted: rollout and training do not run side by side yet."""


def gpus_of(scenario: Scenario, mode: TrainingMode, figures: TrainingFigures) -> tuple[int, int]:
    """Returns the number of GPUs that roll out, in whole replicas, and of those that train. Raises ValueError if none
    are left for training.
    """
    total, each = scenario.gpus.value, scenario.gpus_per_replica.value
    if not mode.apart:
        return total // each * each, total
    rollout = max(each, round(total * (1 - figures.train_share.value) / each) * each)
    if rollout >= total:
        raise ValueError(f"{scenario.name}: {total} GPUs leave none for training; give a larger --scale")
    return rollout, total - rollout


def host_of(
    scenario: Scenario, mode: TrainingMode, seed: int, steps: int, figures: TrainingFigures, *, check: bool = False,
    kv_on_update: str = "fresh", progress: Callable[[int, int], None] | None = None,
) -> TrainingHost:  # fmt: skip
    """Returns the host of a mode, not yet run. Raises ValueError for too few GPUs."""
    rollout_gpus, train_gpus = gpus_of(scenario, mode, figures)
    model = replica_model(scenario.gpu.value, scenario.model.value, scenario.gpus_per_replica.value)
    replicas = rollout_gpus // scenario.gpus_per_replica.value
    cluster = Cluster(model, replicas, scenario.replicas_per_node)
    workload = training_workload(scenario, seed, steps, figures.epoch_steps.value, mode.by_length)
    costs = StepCosts.of(scenario, figures, scenario.gpus.value, mode.old_logprobs)
    policies = mode.system.bundle(scenario.chunk_tokens.value)
    if not finishes(policies.kv_on_update):
        policies = policies.model_copy(update={"kv_on_update": Policies(kv_on_update=kv_on_update).kv_on_update})
    if isinstance(policies.ordering, HistoPipe):
        train_s = sum(map(trained_tokens, workload.steps[0])) * costs.token_gpu_s / train_gpus
        knobs = {"ranking_groups": min(figures.ranking_groups.value, max(replicas // 2, 1)), "train_s": train_s}
        policies = policies.model_copy(update={"ordering": policies.ordering.model_copy(update=knobs)})
    sees = None
    if policies.drafting.max_draft_tokens:
        sees = Sees(scenario.drafting()[0].acceptance, mode.system.evidence)
    fleet = ModelledFleet(cluster, by_policy(policies.drafting, sees, model.step, seed), None)
    return TrainingHost(
        workload=workload,
        fleet=fleet,
        policies=policies,
        mode=mode,
        costs=costs,
        train_gpus=train_gpus,
        check=check,
        progress=progress,
    )


def train_run(
    scenario: Scenario, mode: TrainingMode, seed: int, steps: int, figures: TrainingFigures | None = None, **how
) -> dict:
    """Returns the figures of one training. `how`: keyword arguments of `host_of`.

    step_s: mean seconds from one publication of weights to the next, after WARM_UP steps. total_s: seconds of all
    steps. Shares of the counted time, which may overlap: rollout_share, some replica generates; train_share, training
    runs; weights_share, some replica loads; waiting_share, none of these. idle_share: share of all GPU-seconds in which
    a GPU neither generates, trains nor loads; rollout_idle_share: the same of the GPUs that roll out. staleness:
    updates that a token's weights lack when it is trained on. mixed_share: share of samples with tokens of several
    versions. tail_s: mean seconds from 90 % of a step's samples ended to the last. migrated_share: share of samples
    that left their ranking group. other_step_share: share of groups that were trained on in another step than they came
    with.
    """
    figures = figures or TrainingFigures()
    host = host_of(scenario, mode, seed, steps, figures, **how)
    host.run()
    return figures_of(host, scenario, mode, figures)


def figures_of(host: TrainingHost, scenario: Scenario, mode: TrainingMode, figures: TrainingFigures) -> dict:
    """Returns the figures of a host that has run."""
    steps = len(host.published_s)
    warm = min(WARM_UP, steps - 1)
    begin_s, end_s = host.published_s[warm - 1] if warm else 0.0, host.published_s[-1]
    span_s, busy = end_s - begin_s, host.busy
    rollout_gpus, train_gpus = gpus_of(scenario, mode, figures)
    each = scenario.gpus_per_replica.value
    used = [
        covered_s([*made, *loaded], begin_s, end_s) for made, loaded in zip(busy.generating, busy.loading, strict=True)
    ]
    trained_s = covered_s(busy.training, begin_s, end_s)
    generated, loaded = list(chain(*busy.generating)), list(chain(*busy.loading))
    total = rollout_gpus + train_gpus if mode.apart else train_gpus
    counts, ends = host.made, host.ends_s()
    stale = {key: max(0, key[0] - key[1]) for key in counts}
    tokens = sum(counts.values())
    return {
        "step_s": span_s / (steps - warm),
        "total_s": end_s,
        "tokens_s": sum(count for (step, _), count in counts.items() if step >= warm) / span_s,
        "rollout_share": covered_s(generated, begin_s, end_s) / span_s,
        "train_share": trained_s / span_s,
        "weights_share": covered_s(loaded, begin_s, end_s) / span_s,
        "waiting_share": 1 - covered_s([*generated, *loaded, *busy.training], begin_s, end_s) / span_s,
        "idle_share": 1 - (each * sum(used) + train_gpus * trained_s) / (total * span_s),
        "rollout_idle_share": 1 - sum(used) / (len(used) * span_s) - (0.0 if mode.apart else trained_s / span_s),
        "staleness_mean": sum(stale[key] * count for key, count in counts.items()) / tokens,
        "staleness_max": max(stale.values()),
        "mixed_share": sum(map(_is_mixed, host.versions_of.values())) / len(host.versions_of),
        "tail_s": sum(one[-1] - one[-(-len(one) * 9 // 10) - 1] for one in ends[warm:]) / (steps - warm),
        "migrated_share": host.moved_share(),
        "other_step_share": host.other_step_share(),
        "rollout_gpus": rollout_gpus,
        "train_gpus": train_gpus,
    }


def _is_mixed(chunks: list[tuple[int, int]]) -> bool:
    return len({version for version, tokens in chunks if tokens}) > 1
