"""The runs of `bench tail` in the simulator, without noise, on replicas as fast as the probes measured.

All runs have the same tokens, the same history and the engines' own drafting code (`lab.replay.speculation`), so they
differ by the decisions of policies alone. Invariant: nothing is fitted to the live runs. Called by `bench tail`.
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
"""Number of draws of orderings that draw at random: when the longest sample starts is luck, and a draw is the same for
all policies.
"""

BATCH = "simulated-tail"

UNTOLD = ("race",)
"""Names of runs that are left out: a replay does not distinguish what copies draft from."""

MOST_DRAFTS = DraftConfig().draft_tokens
"""Maximum number of draft tokens of a sample in a step, for the bounds: the default of engines, as in `bench tail`."""

KEPT = ("makespan_s", "tail_s", "replica_s", "returned_replica_s", "bound_share", "reachable_share")


@dataclass(frozen=True)
class Rate:
    """A chance that a draft token is right, `accepted`, which is the same for all samples."""

    accepted: float

    def chance(self, group: WorkloadGroup, index: int, generated: int, mates: int, epochs: int) -> float:
        return self.accepted


def simulated(
    groups: Sequence[PromptGroup], earlier: Sequence[PromptGroup], models: tuple[ReplicaModel, ReplicaModel],
    limits: Limits, named: Mapping[str, Callable[[int], Policies]], say: Callable[[str], None],
) -> dict[str, dict]:  # fmt: skip
    """Returns the figures of each run by name, means over the draws, and all makespans. Leaves out the runs of UNTOLD.

    `models`: models of a replica that never drafts and of one that does. `named`: for each run, its policies by draw.
    `earlier`: groups with the same prompts whose answers are history.
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
    """Returns the model of a replica as fast as the quickest of the probes' steps, without busy neighbours."""
    profile = probes.drafting(pooled(probes.ladders))
    share = min(1.0, *probes.alone) * min(beside_fit(probes.steps(), profile["fit"]))
    return slowed(model_of(profile, *probes.told, 0.0), share)


def least(accepted_share: float | None, groups: Sequence[WorkloadGroup], cluster: Cluster) -> dict[str, float]:
    """Returns the lower bounds of a run. `accepted_share`: share of draft tokens that were right; None: no drafts."""
    accepted = Rate(accepted_share) if accepted_share else None
    return bounds(groups, cluster, accepted, MOST_DRAFTS if accepted else 0)
