"""One self-contained HTML page about runs of one workload: figures, timelines, curves, bars.

Ids, names and notes are data: all text is escaped. All systems share one time axis. `simulate --report` writes it.
"""

from collections.abc import Mapping, Sequence
from html import escape

from tailrace.lab.report.curves import acceptance, ended_share, last_of, over_moments
from tailrace.lab.report.document import document, figure, interactive, legend, panel, table
from tailrace.lab.report.span_columns import ROLES, drawable, held_share, longest_makespan_s, timelines
from tailrace.lab.report.svg_charts import Bar, Colours, Reach, bars, colours_of, curves, histogram
from tailrace.lab.simulator.report import CLAIRVOYANT, TAIL_SHARE, compare, number, percent, rows
from tailrace.lab.simulator.types import SimulatedRun, Span

SECONDS = "seconds"


def page(title: str, runs: Mapping[str, SimulatedRun], comparison: dict | None, notes: Sequence[str]) -> str:
    """Returns the page as text. `runs`: one run of each system; their timelines and curves are drawn. `comparison`: the
    result of `report.compare` over several seeds. Without `comparison` these runs are compared, with the first as the
    baseline.

    Raises ValueError without runs, or for runs of several workloads.
    """
    if not runs:
        raise ValueError("a page needs at least one run")
    if len({run.workload for run in runs.values()}) > 1:
        raise ValueError("the runs of a page are of one workload")
    comparison = comparison or compare({name: [run] for name, run in runs.items()}, next(iter(runs)))
    colours = colours_of([*comparison["mean"], *runs])
    shown = drawable(runs) if any(run.spans for run in runs.values()) else {}
    body = [
        f"<h1>{escape(title)}</h1>",
        _about(runs, comparison),
        _headline(comparison),
        table(rows(comparison)),
        _ratio_bars(comparison, colours),
        _timelines(runs, shown) if shown else "<h2>Replicas</h2><p class=soft>No spans were recorded.</p>",
        _curves(runs, colours),
        _folded(notes),
    ]
    return document(title, "\n".join(body), timelines(runs, shown) if shown else None)


def _folded(notes: Sequence[str]) -> str:
    """Returns the notes, folded until a click: a reader comes for the pictures."""
    if not notes:
        return ""
    lines = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<h2>Notes</h2><details><summary>Assumptions of the model: {len(notes)}</summary>{lines}</details>"


def _about(runs: Mapping[str, SimulatedRun], comparison: dict) -> str:
    run = next(iter(runs.values()))
    tokens = sum(sample.tokens for sample in run.ended)
    replicas = max((moment.replicas for moment in run.moments), default=0)
    seeds = ", ".join(str(seed) for seed in comparison["seeds"])
    return (
        f"<p class=soft>Workload {escape(run.workload)}: {len(run.ended):,} samples, {tokens:,} tokens, {replicas:,} "
        f"replicas. Ratios over seeds {escape(seeds)}; timelines and curves are those of seed {run.seed}.</p>"
    )


def _headline(comparison: dict) -> str:
    """Returns the headline: the system with the greatest throughput, against the baseline. `clairvoyant` is left out:
    nobody can run it, and the others are only compared with it.
    """
    baseline, mean = comparison["baseline"], comparison["mean"]
    others = {name: ratio for name, ratio in comparison["throughput_ratio"].items() if ratio}
    others = {name: ratio for name, ratio in others.items() if name not in (baseline, CLAIRVOYANT)}
    if not others:
        return f"<p class=headline><b>{number(mean[baseline]['makespan_s'])} s</b> {escape(baseline)}</p>"
    best = max(others, key=lambda name: others[name][0])
    tail, bound, reachable = comparison["tail_ratio"][best], mean[best]["bound_share"], mean[best]["reachable_share"]
    known = (comparison.get("clairvoyant_share") or {}).get(best)
    words = [f"<b>{others[best][0]:.2f} ×</b> the throughput of {escape(baseline)}: {escape(best)}"]
    if tail:
        words.append(f"the tail {tail[0]:.2f} × shorter")
    if bound is not None:
        words.append(f"{percent(bound)} of the throughput that the lower bound allows")
    if reachable is not None:
        words.append(f"{percent(reachable)} of what work + longest allows without knowledge of lengths")
    if known:
        words.append(f"{percent(known[0])} of what true lengths allow")
    return f"<p class=headline>{', '.join(words)}</p>"


def _ratio_bars(comparison: dict, colours: Colours) -> str:
    """Returns bars of throughput, tail and makespan of each system. Whiskers are from the minimum to the maximum over
    the seeds.
    """
    baseline, charts = escape(comparison["baseline"]), []
    for key, said in (("throughput_ratio", "Throughput"), ("tail_ratio", "Tail, how much shorter")):
        found = {name: ratio for name, ratio in comparison[key].items() if ratio}
        items = [Bar(name, ratio[0], f"{ratio[0]:.2f} ×", (ratio[1], ratio[2])) for name, ratio in found.items()]
        caption = "Whiskers: min and max over the seeds." if len(comparison["seeds"]) > 1 else ""
        charts.append(figure(f"{said}, against {baseline}", caption, bars(items, "times the baseline", colours, 1.0)))
    spans = [_makespan_bar(name, comparison["mean"][name], comparison["systems"][name]) for name in comparison["mean"]]
    caption = (
        "Shaded: the tail, from 90 % of a step's samples ended to all. Across: the best lower bound of that system."
    )
    charts.append(figure("Makespan", caption, bars(spans, SECONDS, colours)))
    return f"<h2>Against {baseline}</h2><div class=charts>{''.join(charts)}</div>"


def _makespan_bar(name: str, mean: dict, summaries: Sequence[dict]) -> Bar:
    spread = [one["makespan_s"] for one in summaries]
    said = f"{number(mean['makespan_s'])} s"
    return Bar(
        name=name,
        value=mean["makespan_s"],
        said=said,
        whisker=(min(spread), max(spread)),
        part=mean["tail_s"],
        mark=mean["bounds"].get("best_s"),
    )


def _timelines(runs: Mapping[str, SimulatedRun], shown: Mapping[str, Sequence[Span]]) -> str:
    roles = {span.role for run in runs.values() for span in run.spans}
    key = [(f"r{i}", role) for i, role in enumerate(ROLES) if role in roles]
    key += [(f"r{len(ROLES)}", ", ".join(sorted(roles - set(ROLES))))] if roles - set(ROLES) else []
    panels = [_timeline(index, name, run, shown[name]) for index, (name, run) in enumerate(runs.items())]
    said = (
        "A row is a replica, filled by as many lanes as it runs samples (the same scale everywhere); black or white is "
        "the marked sample, at first the one that ended last under the first system."
    )
    return f"<h2>Replicas</h2>{interactive(said, legend(key), panels)}"


def _timeline(index: int, name: str, run: SimulatedRun, shown: Sequence[Span]) -> str:
    replicas = len({span.replica for span in run.spans})
    caption = f"{number(run.makespan_s)} s, {replicas:,} replicas, {len(run.spans):,} spans"
    if len(shown) < len(run.spans):
        held = percent(held_share(shown, run.spans))
        caption += f"; joined where they touch, the {len(shown):,} longest drawn: {held} of all span time"
    said = f"Timeline of {name}: {caption}"
    return figure(escape(name), caption, panel(index, said))


def _curves(runs: Mapping[str, SimulatedRun], colours: Colours) -> str:
    horizon_s = longest_makespan_s(runs)
    x, lengths = (0.0, horizon_s, SECONDS), [sample.tokens for sample in next(iter(runs.values())).ended]
    ended = {name: ended_share(run.ended) for name, run in runs.items()}
    last = {name: last_of(points, 1 - TAIL_SHARE) for name, points in ended.items()}
    shares = [
        curves(x, (low, 1.0, "share ended"), share, colours, stepped=True, share=True)
        for low, share in ((0.0, ended), (1 - TAIL_SHARE, last))
    ]
    charts = [
        _moments_chart(runs, x, colours, "running", "running samples", "Running batch", "Of all replicas together."),
        _moments_chart(runs, x, colours, "kv_tokens", "tokens of KV", "KV in use", "Of running samples."),
        figure("Samples ended", "", shares[0]),
        figure("The tail", "The same, its last tenth.", shares[1]),
    ]
    accepted = {name: acceptance(run.spans, horizon_s) for name, run in runs.items() if _drafts(run)}
    if any(accepted.values()):
        high = 1.05 * max(value for points in accepted.values() for _, value in points)
        drawn = curves(x, (0.0, high, "tokens per verification"), accepted, colours)
        charts.append(figure("Acceptance length", "Tokens per verification, the bonus token included.", drawn))
    said = f"Mean {number(sum(lengths) / max(1, len(lengths)))}, greatest {max(lengths, default=0):,} tokens."
    charts.append(figure("Lengths", said, histogram(lengths, "tokens of a sample", "samples")))
    key = legend([(colours[name], name) for name in runs])
    return f"<h2>Over time</h2>{key}<div class=charts>{''.join(charts)}</div>"


def _moments_chart(
    runs: Mapping[str, SimulatedRun], x: Reach, colours: Colours, field: str, label: str, heading: str, caption: str
) -> str:
    series = {name: over_moments(run, field) for name, run in runs.items()}
    high = max((value for points in series.values() for _, value in points), default=0) or 1
    return figure(heading, caption, curves(x, (0.0, high, label), series, colours, stepped=True))


def _drafts(run: SimulatedRun) -> bool:
    return any(sample.drafted for sample in run.ended)
