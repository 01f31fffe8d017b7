"""Figures of a run: one mapping, for `--json`, and the same as a table."""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from tailrace.deployments.messages.rollout import GroupResult, SampleResult


def quantile(sorted_values: Sequence[float], share: float) -> float:
    """Returns the smallest value that `share` of them do not exceed."""
    return sorted_values[max(0, ceil(len(sorted_values) * share) - 1)]


def summarise(groups: Sequence[GroupResult], arrived_s: Sequence[float] | None = None) -> dict:
    """Returns the figures. Times in seconds since the batch was submitted. tail_s: from 90 % of the samples finished to
    all of them. `arrived_s`: by the driver's clock, seconds from the submission to each group's arrival. Without them
    the times after a lost coordinator count from the second submission.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return {"groups": 0, "samples": 0}
    ends = sorted(sample.timings.finished_s for sample in samples) if arrived_s is None else _ends(groups, arrived_s)
    tokens = sum(len(sample.token_ids) for sample in samples)
    makespan_s = ends[-1]
    per_replica: Counter = Counter()
    for sample in samples:
        for segment in sample.segments:
            per_replica[segment.replica_id] += segment.end - segment.start
    drafted = sum(sample.drafted_tokens for sample in samples)
    return {
        "groups": len(groups),
        "samples": len(samples),
        "tokens": tokens,
        "makespan_s": round(makespan_s, 3),
        "tail_s": round(makespan_s - quantile(ends, 0.9), 3),
        "tail_share": round(1 - quantile(ends, 0.9) / makespan_s, 4) if makespan_s else 0.0,
        "tokens_per_s": round(tokens / makespan_s, 1) if makespan_s else 0.0,
        "mean_sample_s": round(sum(ends) / len(ends), 3),
        "chunked_share": round(sum(sample.chunks > 1 for sample in samples) / len(samples), 4),
        "moved_samples": sum(_moved(sample) for sample in samples),
        "finish_reasons": dict(Counter(str(sample.finish_reason) for sample in samples)),
        "tokens_by_replica": dict(sorted(per_replica.items())),
        "drafted_tokens": drafted,
        "accepted_share": round(sum(s.accepted_tokens for s in samples) / drafted, 4) if drafted else None,
    }


def _ends(groups: Sequence[GroupResult], arrived_s: Sequence[float]) -> list[float]:
    """Returns the ends of all samples in order: the last one of a group ends when the group arrives."""
    ends = []
    for group, at_s in zip(groups, arrived_s, strict=True):
        own = [sample.timings.finished_s for sample in group.samples]
        ends += [at_s - (max(own) - one) for one in own]
    return sorted(ends)


def _moved(sample: SampleResult) -> bool:
    return len({segment.replica_id for segment in sample.segments}) > 1


def table(summary: dict):
    """Returns the summary as a rich table."""
    from rich.table import Table

    out = Table(title="Rollout", show_header=False)
    for key, value in summary.items():
        if value is None:
            continue
        shown = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        out.add_row(key.replace("_", " "), shown)
    return out
