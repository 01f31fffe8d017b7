"""The seconds that a step of rollout needs on GPUs that are divided in some way.

Seconds are those of `bounds`: work + longest is what is reachable without knowledge of lengths. Invariant: a way that
cannot hold the model or its longest sample says why. Called by `tailrace plan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import mean

from tailrace.lab.simulator.acceptance import Chances
from tailrace.lab.simulator.bounds import bounds, reachable_s
from tailrace.lab.simulator.hardware import GPUS, MODELS
from tailrace.lab.simulator.parallelism import Parallelism, replica_of
from tailrace.lab.simulator.types import Cluster, ReplicaModel, WorkloadGroup


@dataclass(frozen=True, slots=True)
class ParallelismCosts:
    """Means over draws of a workload, in seconds: `work_s`, `longest_s` and `memory_s` of `bounds`, and `total_s`, work
    + longest.

    `samples`: those of a step for each replica. `running`: number of them that run at once, by its places and by what
    its KV holds on average. `kv_tokens`: tokens of context that a replica holds. `weights_gb`: 10^9 bytes of
    weights on each GPU.
    """

    work_s: float
    longest_s: float
    memory_s: float
    total_s: float
    samples: int
    running: int
    kv_tokens: int
    weights_gb: float


@dataclass(frozen=True, slots=True)
class PricedParallelism:
    """`costs` is None if the model or its longest sample does not fit; `problem` then says why. `served`: one replica
    of the service can be this: its engine shares every layer over GPUs of one node.
    """

    parallelism: Parallelism
    served: bool
    costs: ParallelismCosts | None = None
    problem: str = ""


def priced(
    gpu: str,
    model: str,
    parallelism: Parallelism,
    draws: Sequence[Sequence[WorkloadGroup]],
    acceptance: Chances | None,
    most_drafts: int,
) -> PricedParallelism:
    """Returns what a step of each of `draws`, each of one group or more, costs on average. Drafts are as of `bounds`.

    Raises ValueError for an unknown name.
    """
    known = MODELS.get(model)
    served = parallelism.tensor == parallelism.gpus_per_replica
    try:
        replica = replica_of(gpu, model, parallelism)
    except ValueError as error:
        if known is None or gpu not in GPUS:
            raise
        return PricedParallelism(parallelism, served, problem=str(error))
    longest = max(one.prompt_tokens + one.outside_tokens + max(one.lengths) for groups in draws for one in groups)
    ranks = parallelism.gpus_per_replica // parallelism.tensor
    if longest > replica.kv_capacity_tokens // ranks:
        held = f"{replica.kv_capacity_tokens // ranks:,} tokens of KV"
        return PricedParallelism(
            parallelism, served, problem=f"a sample of {longest:,} tokens does not fit into {held}"
        )
    cluster = Cluster(replica, parallelism.replicas)
    found = [bounds(groups, cluster, acceptance, most_drafts) for groups in draws]
    samples = ceil(mean(sum(len(group.lengths) for group in groups) for groups in draws) / parallelism.replicas)
    costs = ParallelismCosts(
        work_s=mean(one["work_s"] for one in found),
        longest_s=mean(one["longest_s"] for one in found),
        memory_s=mean(one["memory_s"] for one in found),
        total_s=mean(reachable_s(one) for one in found),
        samples=samples,
        running=_running(samples, replica, draws),
        kv_tokens=replica.kv_capacity_tokens,
        weights_gb=_weights_gb(model, parallelism),
    )
    return PricedParallelism(parallelism, served, costs)


def _running(samples: int, replica: ReplicaModel, draws: Sequence[Sequence[WorkloadGroup]]) -> int:
    """Returns how many of a replica's samples run at once. A running sample holds its prompt and the tokens that it has
    made, over its steps half of its answer, and a long one does so for longer: the mean is sum(l * (p + l / 2)) /
    sum(l). What a tool answers is held from there on.
    """
    every = [group for groups in draws for group in groups]
    held = sum(tokens * (group.prompt_tokens + tokens / 2) for group in every for tokens in group.lengths)
    held += sum(
        gap.outside_tokens * (tokens - gap.tokens)
        for group in every
        for tokens, gaps in zip(group.lengths, group.gaps, strict=False)
        for gap in gaps
    )
    held /= sum(sum(group.lengths) for group in every)
    return max(1, min(samples, replica.max_running, int(replica.kv_capacity_tokens / held)))


def own_size(ways: Sequence[PricedParallelism], gpus_per_replica: int) -> PricedParallelism | None:
    """Returns the way that the simulator's set-ups take for this size: experts are shared and attention is not; None if
    it is not among `ways`.
    """
    same = [one for one in ways if one.parallelism.gpus_per_replica == gpus_per_replica]
    return same[-1] if same else None


def _weights_gb(model: str, parallelism: Parallelism) -> float:
    known = MODELS[model]
    rest = (known.parameters - known.expert_parameters) / parallelism.tensor
    return (rest + known.expert_parameters / parallelism.gpus_per_replica) * known.parameter_bytes / 1e9


def best(ways: Sequence[PricedParallelism], *, served: bool = False) -> PricedParallelism | None:
    """Returns the way with the least work + longest, of those that fit; with `served`, of those that the service can
    run; None if there is none. Equal ways: the one with more replicas.
    """
    able = [one for one in ways if one.costs is not None and (one.served or not served)]
    return min(able, key=lambda one: (one.costs.total_s, -one.parallelism.replicas), default=None)
