"""Status of the replicas (the core's books joined with the replicas' own reports) and of the longest samples. Called by
`Rollouts`.
"""

from collections.abc import Mapping

from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.status import ReplicaStatus, SampleStatus
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.rollout import RolloutCore


def replica_statuses(table: ReplicaTable, reports: Mapping[str, EngineStats]) -> tuple[ReplicaStatus, ...]:
    """Returns one status per joined replica, in order of ids."""
    return tuple(
        ReplicaStatus(
            replica_id=view.replica_id,
            ready=table.is_ready(view.replica_id),
            running=view.running,
            max_running=view.max_running,
            kv_used_share=1 - view.kv_free_tokens / max(1, view.kv_capacity_tokens),
            weights_version=view.weights_version,
            closing=table.is_closing(view.replica_id),
            aside=table.aside(view.replica_id),
            **_reported(reports.get(view.replica_id)),
        )
        for view in table.views()
    )


def _reported(report: EngineStats | None) -> dict:
    """Returns the fields of ReplicaStatus that a replica reports itself; none before its first report."""
    if report is None:
        return {"preemptions": 0}
    kept = ("preemptions", "work", "performance", "node_id", "cores", "dtype", "ranks", "weight_transfer", "max_loras")
    return {name: getattr(report, name) for name in kept}


def waits_for(table: ReplicaTable, batches: bool, problem: str | None, held: bool) -> str | None:
    """Returns the reason why no chunk can run, or None if chunks can. `held`: the service is paused."""
    if not batches or table.ready():
        return None
    if held:
        return "a resume: the service is paused"
    aside = [
        f"{view.replica_id} is set aside: {why}" for view in table.views() if (why := table.aside(view.replica_id))
    ]
    why = f" ({'; '.join([problem, *aside] if problem else aside)})" if problem or aside else ""
    return f"an engine replica under weights version {table.weights_version}; none is ready{why}"


def longest_samples(core: RolloutCore, count: int) -> tuple[SampleStatus, ...]:
    """Returns the `count` unended samples with most answer tokens, longest first."""
    return tuple(
        SampleStatus(
            sample_id=view.sample_id,
            state=state,
            replica_id=view.last_replica,
            tokens=view.generated_tokens + view.streamed_tokens,
            expected_tokens=view.expected_tokens,
            max_tokens=view.max_tokens,
            chunks=view.chunks,
            copies=copies,
        )
        for view, state, copies in core.longest(count)
    )
