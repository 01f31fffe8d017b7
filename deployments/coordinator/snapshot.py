"""A snapshot of the service: the coordinator's books joined with the replicas' own reports.

Invariant: it reads the parts of `Rollouts`, and changes none. Called by `Rollouts` alone.
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tailrace.deployments.coordinator.replica_registry import ReplicaRegistry
from tailrace.deployments.feed.survey import Survey, tokens_of, why_of
from tailrace.deployments.feed.trails import Trails
from tailrace.deployments.messages.chunk import EngineStats
from tailrace.deployments.messages.status import ReplicaStatus, SampleStatus, ServiceSnapshot
from tailrace.policies.core.replica_table import ReplicaTable
from tailrace.policies.core.request_buffer import Sample
from tailrace.policies.core.rollout import RolloutCore

if TYPE_CHECKING:  # it imports this file
    from tailrace.deployments.coordinator.rollouts import Rollouts


def service_snapshot(rollouts: "Rollouts", survey: Survey) -> ServiceSnapshot:
    """See `Rollouts.status`."""
    core, now_s, weights, target = rollouts.core, rollouts.loop.now(), rollouts.weights, rollouts.replica_target
    counts, pool, context = core.counts(), rollouts.kv_pool_manager, rollouts.context
    problem = "; ".join(filter(None, (weights.problem, weights.scores.problem))) or None
    survey.look(core)
    return ServiceSnapshot(
        coordinator_s=now_s,
        waiting=counts["waiting"],
        running=counts["running"],
        held=counts["held"],
        queued=core.queued(),
        waiting_for=survey.waiting,
        longest=sample_statuses(core, survey.longest(), rollouts.trails),
        batches=rollouts.batches.statuses(rollouts.unix_s, survey.tokens),
        replicas=replica_statuses(core, rollouts.registry, now_s),
        wanted=target.wanted,
        wanted_why=target.reason,
        observed_s=now_s - min(rollouts.registry.observed_at.values(), default=now_s),
        waits_for=waits_for(core.replicas, bool(rollouts.batches), problem, rollouts.admission.held),
        policies=core.policies.model_dump(),
        weights_version=weights.version,
        weights_digest=weights.digest,
        weights_source=weights.source,
        weights_problem=problem or "",
        pool=None if pool is None else pool.view(),
        context=None if context is None else context.counts(),
        held_bytes=rollouts.deliveries.held_bytes(),
        at_admission=rollouts.admission.waiting,
        model=rollouts.prompts.model,
        max_model_len=rollouts.prompts.max_model_len,
        exactness=rollouts.core_holder.exactness,
        paused=rollouts.admission.is_paused,
        asleep=rollouts.sleep.tags,
        adapters=rollouts.adapters.book.all(),
        contained=rollouts.contained + rollouts.token_log.problems,
        acceptance=rollouts.acceptance.row(),
        faults=rollouts.logs.faults(),
    )


def book_sizes(rollouts: "Rollouts") -> dict[str, int]:
    """See `Rollouts.books`."""
    here = {
        "at_admission": len(rollouts.admission.waiting),
        "deliveries": len(rollouts.deliveries),
        "sessions": len(rollouts.sessions),
        "trajectories": len(rollouts.trajectories),
        "events": len(rollouts.loop),
        "tasks": len(rollouts.loop.tasks) + rollouts.deliveries.submitting + rollouts.sessions.submitting,
        "trails": rollouts.trails.unended,
    }
    return rollouts.core.counts() | rollouts.batches.counts() | here


def replica_statuses(core: RolloutCore, registry: ReplicaRegistry, now_s: float) -> tuple[ReplicaStatus, ...]:
    """Returns one status per joined replica, in order of ids. `now_s`: the coordinator's clock."""
    table, copies = core.replicas, Counter(replica_id for _, replica_id in core.copies())
    reports, observed_at = registry.reports, registry.observed_at
    found = []
    for view in table.views():
        name = view.replica_id
        used = 1 - view.kv_free_tokens / max(1, view.kv_capacity_tokens)
        known = (
            name, table.is_ready(name), view.running, view.max_running, used, view.weights_version,
            table.is_closing(name), table.aside(name), copies[name], view.node_id,
        )  # fmt: skip
        said = _reported(reports[name], now_s - observed_at[name]) if name in reports else ()
        found.append(ReplicaStatus(*known, *said))  # by position, in a fifth of the time that keywords take
    return tuple(found)


def _reported(report: EngineStats, observed_s: float) -> tuple:
    """Returns the last fields of a ReplicaStatus. `observed_s`: age of the report."""
    return (
        observed_s, report.preemptions, report.work, report.performance, report.cores, report.dtype, report.ranks,
        report.weight_transfer, report.max_loras, report.step_counts, report.weights_pause_s,
        report.keeps_routes,
    )  # fmt: skip


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
