"""The runs of `bench tail` in the simulator: what policies come to on replicas as probes found them, without noise.

Same tokens, same history, the engines' own drafting code (`lab.replay.speculation`): two runs differ by what policies
decide, and by nothing else. Invariant: nothing is fitted to the live runs. Called by `bench tail`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from tailrace.deployments.messages.context import PastAnswer
from tailrace.deployments.messages.rollout import PromptGroup
from tailrace.deployments.vllm_exact.engine_config import DraftConfig
from tailrace.lab.benchmarks.live.calibrate import beside_fit, slowed, workload
from tailrace.lab.benchmarks.live.probes import Probes, model_of, pooled
from tailrace.lab.replay.recorded import Recorded, forced
from tailrace.lab.replay.speculation import replaying
from tailrace.lab.simulator.bounds import bounds
from tailrace.lab.simulator.host import simulate
from tailrace.lab.simulator.report import summary
from tailrace.lab.simulator.types import Cluster, ReplicaModel, SimulatedRun, WorkloadGroup
from tailrace.policies.core.scaling import Limits
from tailrace.policies.families.registry import Policies

DRAWS = 8
"""Of orders that draw: when the one long sample starts is luck, the same for all policies in a draw."""

BATCH = "simulated-tail"

UNTOLD = ("race",)
"""Runs left out: what copies draft from is all one to a replay."""

MOST_DRAFTS = DraftConfig().draft_tokens
"""Draft tokens of a step that the bounds allow for: what `bench tail` has its engines draft at most."""

KEPT = ("makespan_s", "tail_s", "replica_s", "returned_replica_s", "bound_share", "reachable_share")


@dataclass(frozen=True)
class Rate:
    """Drafts that are right so often, whatever the sample."""

    accepted: float

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        return self.accepted


def simulated(
    groups: Sequence[PromptGroup], earlier: Sequence[PromptGroup], models: tuple[ReplicaModel, ReplicaModel],
    limits: Limits, named: Mapping[str, Callable[[int], Policies]], say: Callable[[str], None],
) -> dict[str, dict]:  # fmt: skip
    """Means over the draws of each run, by name, and all makespans. `models`: of a replica that never drafts and of one
    that does; `named`: policies by draw; `earlier`: answers to the same prompts, which are history.

    Without those in `UNTOLD`.
    """
    found = {}
    for name, policies_of in named.items():
        if name in UNTOLD:
            continue
        runs = [summary(_run(groups, earlier, models, limits, policies_of(draw))) for draw in range(DRAWS)]
        found[name] = {key: round(mean(run[key] for run in runs), 4) for key in KEPT}
        found[name]["all_makespan_s"] = [run["makespan_s"] for run in runs]
        say(f"{name}, simulated: {found[name]}")
    return found


def _run(groups, earlier, models, limits: Limits, policies: Policies) -> SimulatedRun:
    plain, drafting = models
    work, recorded, past = workload(groups, BATCH), forced(groups, BATCH), forced(earlier, BATCH)
    recorded = {group_id: one._replace(history=_history(past[group_id])) for group_id, one in recorded.items()}
    cluster = Cluster(drafting if policies.drafting.max_draft_tokens else plain, limits.max, limits.max)
    with replaying(work, recorded, policies.drafting, cluster.replica.step) as speculation:
        reveal = policies.lanes.sees_truth
        run = simulate(work, cluster, policies, speculation=speculation, elastic=limits, reveal=reveal)
    drafted, accepted = (sum(getattr(sample, key) for sample in run.ended) for key in ("drafted", "accepted"))
    return replace(run, bounds=least(accepted / drafted if drafted else None, work.steps[0], cluster))


def _history(past: Recorded) -> list[PastAnswer]:
    return [PastAnswer("", 0, 0, None, answer) for answer in past.answers]


def quickest(probes: Probes) -> ReplicaModel:
    """A replica as in the quickest of the probes' steps."""
    profile = probes.drafting(pooled(probes.ladders))
    share = min(1.0, *probes.alone) * min(beside_fit(probes.steps(), profile["fit"]))
    return slowed(model_of(profile, *probes.told, 0.0), share)


def least(accepted_share: float | None, groups: Sequence[WorkloadGroup], cluster: Cluster) -> dict[str, float]:
    """The simulator's lower bounds for a run of which this share of the draft tokens was right; None: no drafts."""
    accepted = Rate(accepted_share) if accepted_share else None
    return bounds(groups, cluster, accepted, MOST_DRAFTS if accepted else 0)
