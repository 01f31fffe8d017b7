"""Parts of a snapshot: replicas (the core's books joined with their own reports), samples, and why no chunk runs.

Pure: books in, messages out. Called by `Rollouts.status` alone.
"""

from collections import Counter
from collections.abc import Iterable

from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.feed.survey import tokens_of, why_of
from tailrace.deployments.feed.trails import Trails
from tailrace.deployments.messages.status import ReplicaStatus, SampleStatus
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.core.rollout import RolloutCore

REPORTED = (
    "preemptions", "work", "performance", "cores", "dtype", "ranks", "weight_transfer", "max_loras", "step_counts",
    "weights_pause_s",
)  # fmt: skip
"""Fields of a ReplicaStatus that its replica reports itself."""


def replica_statuses(core: RolloutCore, registry: ReplicaRegistry, now_s: float) -> tuple[ReplicaStatus, ...]:
    """Returns one status per joined replica, in order of ids. `now_s`: the coordinator's clock."""
    table, copies = core.replicas, Counter(replica_id for _, replica_id in core.copies())
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
            copies=copies[view.replica_id],
            node_id=view.node_id,
            **_reported(registry, view.replica_id, now_s),
        )
        for view in table.views()
    )


def _reported(registry: ReplicaRegistry, replica_id: str, now_s: float) -> dict:
    report = registry.reports.get(replica_id)
    if report is None:
        return {}
    said = {name: getattr(report, name) for name in REPORTED}
    return said | {"observed_s": now_s - registry.observed_at[replica_id]}


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


def sample_statuses(core: RolloutCore, samples: Iterable[Sample], trails: Trails) -> tuple[SampleStatus, ...]:
    """Returns the statuses of unended samples, in their order."""
    copies = Counter(sample_id for sample_id, _ in core.copies())
    return tuple(
        SampleStatus(
            sample_id=sample.sample_id,
            state=sample.state.value,
            replica_id=sample.last_replica,
            tokens=tokens_of(sample),
            expected_tokens=sample.expected_tokens,
            max_tokens=sample.max_tokens,
            chunks=sample.chunks,
            copies=copies[sample.sample_id],
            why=why_of(core, sample, trails.get(sample.sample_id)),
        )
        for sample in samples
    )
