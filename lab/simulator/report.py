"""Figures of runs: plain JSON values for one run, ratios between systems, and the rows of a table.

Systems are compared seed by seed, so that luck of the draw is no part of a ratio. The same runs give the same bytes:
keys have a fixed order, and numbers have six significant digits. `simulate`, `compare` and the page read these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import ceil

from tailrace.lab.simulator.acceptance import Chances
from tailrace.lab.simulator.bounds import alone_s, reachable_s
from tailrace.lab.simulator.types import (
    TURN_MARK,
    Cluster,
    Ended,
    Moment,
    SimulatedRun,
    Span,
    StepModel,
    Workload,
    WorkloadGroup,
)

TAIL_SHARE = 0.1
"""The last samples of a step whose time is its tail, as in app/summary.py."""

CLAIRVOYANT = "clairvoyant"
"""Name of the system that schedules by true lengths: what it reaches is reachable with knowledge."""

IDENTITY = ("system", "workload", "seed")

PARTS = ("waited_s", "loaded_s", "crowd_s", "drafts_s", "alone_s")
"""Parts of the life of the sample that ended last, see `account`."""


def summary(run: SimulatedRun) -> dict:
    """Returns the figures of a run. Times in seconds; samples' times count from their submission.

    tail_s: from 90 % of a step's samples ended to all of them, summed over steps. replica_s: replicas up, integrated;
    returned_replica_s: replicas of the run's beginning that were not up, integrated to its end. idle_share: share of
    replica_s in which a replica did nothing; None if no spans were recorded. acceptance_length: tokens per
    verification. bound_share: share of the makespan that the best lower bound needs; reachable_share: the same of
    reachable_s, work + longest, which is above 1 for schedules that use knowledge well. last_*: seconds of the sample
    that ended last, see `account`; None if no spans were recorded.
    """
    ended = run.ended
    tokens = sum(sample.tokens for sample in ended)
    verifications = sum(sample.verifications for sample in ended)
    tail_s = sum(end_s - begin_s for begin_s, end_s in tails(ended))
    replica_s = replica_seconds(run.moments, run.makespan_s)
    without_knowledge_s = reachable_s(run.bounds)
    return _rounded(
        {
            "system": run.system,
            "workload": run.workload,
            "seed": run.seed,
            "samples": len(ended),
            "tokens": tokens,
            "makespan_s": run.makespan_s,
            "tail_s": tail_s,
            "tail_share": _ratio(tail_s, run.makespan_s),
            "tokens_per_s": _ratio(tokens, run.makespan_s),
            "mean_sample_s": _ratio(sum(sample.ended_s - sample.submitted_s for sample in ended), len(ended)),
            "replica_s": replica_s,
            "returned_replica_s": replica_seconds(_returned(run.moments), run.makespan_s),
            "idle_share": _ratio(replica_s - busy_seconds(run.spans), replica_s) if run.spans else None,
            "chunks": sum(sample.chunks for sample in ended),
            "moves": sum(sample.moves for sample in ended),
            "preemptions": sum(sample.preemptions for sample in ended),
            "recomputed_tokens": sum(sample.recomputed_tokens for sample in ended),
            "verifications": verifications,
            "acceptance_length": _ratio(tokens, verifications),
            "drafted": sum(sample.drafted for sample in ended),
            "accepted": sum(sample.accepted for sample in ended),
            "bounds": dict(run.bounds),
            "bound_share": _ratio(run.bounds["best_s"], run.makespan_s) if "best_s" in run.bounds else None,
            "reachable_s": without_knowledge_s,
            "reachable_share": None if without_knowledge_s is None else _ratio(without_knowledge_s, run.makespan_s),
            "events": run.events,
            **{f"last_{part}": run.account.get(part) for part in PARTS},
        }
    )


def compare(runs: Mapping[str, Sequence[SimulatedRun]], baseline: str) -> dict:
    """Returns `ratios` of the runs of each system."""
    return ratios({system: [summary(run) for run in of_system] for system, of_system in runs.items()}, baseline)


def ratios(systems: Mapping[str, Sequence[dict]], baseline: str) -> dict:
    """Returns summaries by system, and [mean, min, max] over the seeds of each system's gain over the baseline's same
    seed.

    throughput_ratio: its tokens a second over the baseline's; tail_ratio: the baseline's tail over its own; None if the
    divisor is 0 or missing. clairvoyant_share: the makespan of the system `clairvoyant` over its own, where that system
    is among them. Raises ValueError for an unknown baseline, a second workload, or other seeds than the
    baseline's.
    """
    if baseline not in systems:
        raise ValueError(f"baseline {baseline}: not among {', '.join(systems)}")
    seeds = [one["seed"] for one in systems[baseline]]
    workload = systems[baseline][0]["workload"]
    for system, summaries in systems.items():
        if [one["seed"] for one in summaries] != seeds:
            raise ValueError(f"{system}: seeds differ from those of {baseline}")
        if {one["workload"] for one in summaries} != {workload}:
            raise ValueError(f"{system}: another workload than {workload}")

    def over_seeds(figure: Callable[[dict, dict], float | None], of: str = baseline) -> dict:
        pairs = {system: zip(summaries, systems[of], strict=True) for system, summaries in systems.items()}
        return _rounded({system: spread([figure(*pair) for pair in both]) for system, both in pairs.items()})

    def of_clairvoyant(own: dict, clairvoyant: dict) -> float | None:
        return _ratio(clairvoyant["makespan_s"], own["makespan_s"])

    known = {"clairvoyant_share": over_seeds(of_clairvoyant, CLAIRVOYANT)} if CLAIRVOYANT in systems else {}
    return {
        "workload": workload,
        "baseline": baseline,
        "seeds": seeds,
        "throughput_ratio": over_seeds(lambda own, base: _ratio(own["tokens_per_s"], base["tokens_per_s"])),
        "tail_ratio": over_seeds(lambda own, base: _ratio(base["tail_s"], own["tail_s"])),
        "bound_share": over_seeds(lambda own, base: own["bound_share"]),
        "reachable_share": over_seeds(lambda own, base: own["reachable_share"]),
        **known,
        "mean": {system: mean_summary(summaries) for system, summaries in systems.items()},
        "systems": {system: list(summaries) for system, summaries in systems.items()},
    }


def mean_summary(summaries: Sequence[dict]) -> dict:
    """Returns the mean of each figure over the seeds; None if a seed has none."""
    means = {key: _mean([one[key] for one in summaries]) for key in summaries[0] if key not in (*IDENTITY, "bounds")}
    bounds = {key: _mean([one["bounds"].get(key) for one in summaries]) for key in summaries[0]["bounds"]}
    return _rounded({**means, "bounds": bounds})


def spread(values: Sequence[float | None]) -> list[float] | None:
    """Returns [mean, min, max], or None if a value is missing."""
    return None if None in values or not values else [sum(values) / len(values), min(values), max(values)]


def rows(comparison: dict) -> list[list[str]]:
    """Returns a comparison as a table: the heads, then a row for each system. Ratios show their range over the
    seeds. Shares of `clairvoyant` have a column if it is among the systems.
    """
    known = comparison.get("clairvoyant_share")
    heads = [
        "system",
        "throughput",
        "tail",
        "makespan s",
        "tail s",
        "tokens/s",
        "acceptance length",
        "idle",
        "of bound",
        "of work + longest",
        *(["of clairvoyant"] if known else []),
        "replica s",
        "given back",
    ]
    heads += ["moves", "preempted", "recomputed"]
    table = [heads]
    for system, mean in comparison["mean"].items():
        times = [_times(comparison[key][system]) for key in ("throughput_ratio", "tail_ratio")]
        seconds = [number(mean[key]) for key in ("makespan_s", "tail_s", "tokens_per_s", "acceptance_length")]
        shares = [percent(mean[key]) for key in ("idle_share", "bound_share", "reachable_share")]
        shares += [percent(known[system] and known[system][0])] if known else []
        keys = ("replica_s", "returned_replica_s", "moves", "preemptions", "recomputed_tokens")
        counts = [number(mean[key]) for key in keys]
        table.append([system, *times, *seconds, *shares, *counts])
    return table


def account_rows(comparison: dict) -> list[list[str]]:
    """Returns the seconds of the sample that ended last, of each system: the heads, then means over the seeds."""
    heads = ["system", "waited", "loaded", "crowd", "drafts", "alone", "best bound", "work + longest"]
    keys = [f"last_{part}" for part in PARTS]
    rows = [
        [name, *(number(mean[key]) for key in keys), number(mean["bounds"].get("best_s")), number(mean["reachable_s"])]
        for name, mean in comparison["mean"].items()
    ]
    return [heads, *rows]


def number(value: float | None) -> str:
    """Returns four significant digits, with separators: 12,340 or 3.142; a dash for None."""
    if value is None:
        return "–"
    return f"{float(f'{value:.4g}'):,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _times(ratio: list[float] | None) -> str:
    """Returns `2.13 × (2.05 to 2.20)`, without a range if the seeds agree."""
    if ratio is None:
        return "–"
    mean, least, greatest = (f"{value:.2f}" for value in ratio)
    return f"{mean} ×" + (f" ({least} to {greatest})" if least != greatest else "")


def replica_seconds(moments: Sequence[Moment], end_s: float) -> float:
    """Returns the replicas that were up, integrated from the first moment to end_s."""
    ends = [*(moment.at_s for moment in moments[1:]), end_s]
    return sum(moment.replicas * max(0.0, until - moment.at_s) for moment, until in zip(moments, ends, strict=False))


def _returned(moments: Sequence[Moment]) -> list[Moment]:
    """Returns the moments with the replicas that were there at first and are not now."""
    return [moment._replace(replicas=moments[0].replicas - moment.replicas) for moment in moments]


def busy_seconds(spans: Sequence[Span]) -> float:
    """Returns the union of each replica's spans, summed over replicas."""
    total = 0.0
    for _, of_replica in groupby(sorted(spans, key=_place), key=lambda span: span.replica):
        covered_s = float("-inf")
        for span in of_replica:
            total += max(0.0, span.end_s - max(span.begin_s, covered_s))
            covered_s = max(covered_s, span.end_s)
    return total


def _place(span: Span) -> tuple[int, float]:
    return span.replica, span.begin_s


def tails(ended: Sequence[Ended]) -> list[tuple[float, float]]:
    """Returns for each step the time from the earliest end that 90 % of its samples do not exceed to its last end."""
    found = []
    by_step = sorted(ended, key=lambda sample: (sample.step, sample.ended_s))
    for _, of_step in groupby(by_step, key=lambda sample: sample.step):
        ends = [sample.ended_s for sample in of_step]
        found.append((ends[max(0, ceil(len(ends) * (1 - TAIL_SHARE)) - 1)], ends[-1]))
    return found


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(values) / len(values)


def _rounded(value):
    """Rounds floats to six significant digits, through mappings and lists."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def account(
    run: SimulatedRun, workload: Workload, cluster: Cluster, acceptance: Chances | None, most_drafts: int
) -> dict[str, float]:
    """Returns where the seconds of a step went: those of the sample that it ended with, summed over steps, by PARTS.

    waited_s: it was not running: order, room, hand-overs. loaded_s: KV fetched, and context computed; not that of
    copies, beside which it runs. crowd_s: how much longer its steps took than without mates, prompts of others
    included. drafts_s: how much longer its steps without mates would take than those of the best possible drafts.
    alone_s: these, below which no policy comes.
    """
    found = dict.fromkeys(PARTS, 0.0)
    for last in _last(run.ended):
        group, index = _member(workload.steps[last.step], last.sample_id)
        best_s = alone_s(group, index, cluster.replica, acceptance, most_drafts)
        spans = [span for span in run.spans if _is_of(span, last)]
        for name, seconds in _parts(last, spans, group, cluster.replica.step, best_s).items():
            found[name] += seconds
    return found


def _last(ended: Sequence[Ended]) -> Iterator[Ended]:
    """Yields the sample of each step that ended last."""
    for _, samples in groupby(sorted(ended, key=lambda one: one.step), key=lambda one: one.step):
        yield max(samples, key=lambda one: one.ended_s)


def _is_of(span: Span, sample: Ended) -> bool:
    """Returns whether a span is of a turn of this sample. In each step there may be a sample of this id."""
    own = span.sample_id == sample.sample_id or span.sample_id.startswith(sample.sample_id + TURN_MARK)
    return own and sample.submitted_s <= span.begin_s < sample.ended_s


def _member(groups: Sequence[WorkloadGroup], sample_id: str) -> tuple[WorkloadGroup, int]:
    group_id, _, index = sample_id.rpartition("#")
    return next(group for group in groups if group.group_id == group_id), int(index)


def _parts(
    last: Ended, spans: Sequence[Span], group: WorkloadGroup, step: StepModel, best_s: float
) -> dict[str, float]:
    made = [span for span in spans if span.role == "generate"]
    generated_s = sum(span.end_s - span.begin_s for span in made)
    loads = [span for span in spans if span.role in ("fetch", "prefill")]
    loaded_s = busy_seconds([span._replace(replica=0) for span in (*made, *loads)]) - generated_s
    own_s, context = 0.0, group.prompt_tokens
    computed = 1.0 + last.drafted / max(1.0, last.verifications)
    for span in made:
        own_s += span.verifications * step.seconds(computed, context + span.tokens / 2)
        context += span.tokens
    waited_s = last.ended_s - last.submitted_s - generated_s - loaded_s
    parts = (waited_s, loaded_s, generated_s - own_s, own_s - best_s, best_s)
    return dict(zip(PARTS, parts, strict=True))
