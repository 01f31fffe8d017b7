"""One self-contained HTML page about runs of one workload: figures, timelines, curves, bars. Nothing is fetched.

Ids, names and notes are data: text is escaped, the data block holds no `<`, and the page's own content policy lets
no script run but ours, by its digest. All systems share one time axis. `simulate --report` writes it.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path

from app.simulator.curves import acceptance, ended_share, last_of, over_moments
from app.simulator.pictures import Bar, Colours, Reach, bars, colours_of, curves, histogram
from app.simulator.report import TAIL_SHARE, compare, number, percent, rows
from app.simulator.timelines import ROLES, drawable, held_share, longest_makespan_s, timelines
from app.simulator.types import Run, Span

WEB = Path(__file__).parent / "web"
"""The style sheet and the one script."""

SECONDS = "seconds"


def page(title: str, runs: Mapping[str, Run], comparison: dict | None, notes: Sequence[str]) -> str:
    """The page, as text. `runs`: one of each system, whose timelines and curves are drawn; `comparison`: what
    report.compare said over several seeds; without it these runs are compared, the first the baseline.

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
        *(f"<p>{escape(note)}</p>" for note in notes),
        _table(comparison),
        _ratio_bars(comparison, colours),
        _timelines(runs, shown) if shown else "<h2>Replicas</h2><p class=soft>No spans were recorded.</p>",
        _curves(runs, colours),
    ]
    return _document(title, "\n".join(body), timelines(runs, shown) if shown else None)


def _document(title: str, body: str, data: dict | None) -> str:
    css, script = _asset("page.css"), _asset("timelines.js")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    scripts = f'<script type="application/json" id="spans">{_inert(data)}</script>\n<script>{script}</script>\n'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"{scripts if data else ''}</body>\n</html>\n"
    )


@cache
def _asset(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _inert(data: dict | None) -> str:
    """JSON that no HTML parser can mistake for markup."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _about(runs: Mapping[str, Run], comparison: dict) -> str:
    run = next(iter(runs.values()))
    tokens = sum(sample.tokens for sample in run.ended)
    replicas = max((moment.replicas for moment in run.moments), default=0)
    seeds = ", ".join(str(seed) for seed in comparison["seeds"])
    return (
        f"<p class=soft>Workload {escape(run.workload)}: {len(run.ended):,} samples, {tokens:,} tokens, {replicas:,} "
        f"replicas. Ratios over seeds {escape(seeds)}; timelines and curves are those of seed {run.seed}.</p>"
    )


def _headline(comparison: dict) -> str:
    """The system with the greatest throughput, against the baseline."""
    baseline, mean = comparison["baseline"], comparison["mean"]
    others = {name: ratio for name, ratio in comparison["throughput_ratio"].items() if name != baseline and ratio}
    if not others:
        return f"<p class=headline><b>{number(mean[baseline]['makespan_s'])} s</b> {escape(baseline)}</p>"
    best = max(others, key=lambda name: others[name][0])
    tail, bound = comparison["tail_ratio"][best], mean[best]["bound_share"]
    words = [f"<b>{others[best][0]:.2f} ×</b> the throughput of {escape(baseline)}: {escape(best)}"]
    if tail:
        words.append(f"the tail {tail[0]:.2f} × shorter")
    if bound is not None:
        words.append(f"{percent(bound)} of what the lower bound allows")
    return f"<p class=headline>{', '.join(words)}</p>"


def _table(comparison: dict) -> str:
    heads, *body = rows(comparison)
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in heads)
    lines = []
    for name, *cells in body:
        lines.append(f"<tr><th scope=row>{escape(name)}</th>{''.join(f'<td>{escape(c)}</td>' for c in cells)}</tr>")
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _ratio_bars(comparison: dict, colours: Colours) -> str:
    """Throughput, tail and makespan of each system; whiskers from the least to the greatest seed."""
    baseline, charts = escape(comparison["baseline"]), []
    for key, said in (("throughput_ratio", "Throughput"), ("tail_ratio", "Tail, how much shorter")):
        found = {name: ratio for name, ratio in comparison[key].items() if ratio}
        items = [Bar(name, ratio[0], f"{ratio[0]:.2f} ×", (ratio[1], ratio[2])) for name, ratio in found.items()]
        caption = "Whiskers: the least and the greatest of the seeds." if len(comparison["seeds"]) > 1 else ""
        charts.append(_figure(f"{said}, against {baseline}", caption, bars(items, "times the baseline", colours, 1.0)))
    spans = [_makespan_bar(name, comparison["mean"][name], comparison["systems"][name]) for name in comparison["mean"]]
    caption = (
        "Shaded: the tail, from 90 % of a step's samples ended to all. Across: the best lower bound of that system."
    )
    charts.append(_figure("Makespan", caption, bars(spans, SECONDS, colours)))
    return f"<h2>Against {baseline}</h2><div class=charts>{''.join(charts)}</div>"


def _makespan_bar(name: str, mean: dict, summaries: Sequence[dict]) -> Bar:
    spread = [one["makespan_s"] for one in summaries]
    said = f"{number(mean['makespan_s'])} s"
    return Bar(name, mean["makespan_s"], said, (min(spread), max(spread)), mean["tail_s"], mean["bounds"].get("best_s"))


def _timelines(runs: Mapping[str, Run], shown: Mapping[str, Sequence[Span]]) -> str:
    roles = {span.role for run in runs.values() for span in run.spans}
    key = "".join(f'<li class="r{i}"><i></i>{role}</li>' for i, role in enumerate(ROLES) if role in roles)
    key += f'<li class="r5"><i></i>{escape(", ".join(sorted(roles - set(ROLES))))}</li>' if roles - set(ROLES) else ""
    panels = [_timeline(index, name, run, shown[name]) for index, (name, run) in enumerate(runs.items())]
    return (
        "<h2>Replicas</h2><p class=soft>A row is a replica, filled by as many lanes as it runs samples (the same scale "
        "everywhere); black or white is the marked sample, at first the one that ended last under the first system. "
        "Click a span to mark its sample, drag to zoom all systems. Keys on a timeline: arrows go from span to span, "
        "Enter marks, + and − zoom, 0 shows all, Escape unmarks.</p>"
        f"<ul class=key>{key}</ul><div class=controls><label>Mark sample <input id=find autocomplete=off "
        "spellcheck=false></label><button id=whole type=button>Show all</button></div>"
        f'<output id=told aria-live="polite"></output>{"".join(panels)}<div id=tip hidden></div>'
        "<noscript><p>Timelines are drawn by the page's own script, which is switched off.</p></noscript>"
    )


def _timeline(index: int, name: str, run: Run, shown: Sequence[Span]) -> str:
    replicas = len({span.replica for span in run.spans})
    caption = f"{number(run.makespan_s)} s, {replicas:,} replicas, {len(run.spans):,} spans"
    if len(shown) < len(run.spans):
        held = percent(held_share(shown, run.spans))
        caption += f"; joined where they touch, the {len(shown):,} longest drawn: {held} of all span time"
    said = escape(f"Timeline of {name}: {caption}")
    canvas = f'<canvas id="run{index}" tabindex="0" role="img" aria-label="{said}"></canvas>'
    stack = f'<div class=stack>{canvas}<canvas class=over aria-hidden="true"></canvas></div>'
    return _figure(escape(name), caption, stack)


def _curves(runs: Mapping[str, Run], colours: Colours) -> str:
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
        _figure("Samples ended", "", shares[0]),
        _figure("The tail", "The same, its last tenth.", shares[1]),
    ]
    accepted = {name: acceptance(run.spans, horizon_s) for name, run in runs.items() if _drafts(run)}
    if any(accepted.values()):
        high = 1.05 * max(value for points in accepted.values() for _, value in points)
        drawn = curves(x, (0.0, high, "tokens per verification"), accepted, colours)
        charts.append(_figure("Acceptance length", "Tokens per verification, the bonus token included.", drawn))
    said = f"Mean {number(sum(lengths) / max(1, len(lengths)))}, greatest {max(lengths, default=0):,} tokens."
    charts.append(_figure("Lengths", said, histogram(lengths, "tokens of a sample", "samples")))
    key = "".join(f'<li class="{colours[name]}"><i></i>{escape(name)}</li>' for name in runs)
    return f"<h2>Over time</h2><ul class=key>{key}</ul><div class=charts>{''.join(charts)}</div>"


def _moments_chart(
    runs: Mapping[str, Run], x: Reach, colours: Colours, field: str, label: str, heading: str, caption: str
) -> str:
    series = {name: over_moments(run, field) for name, run in runs.items()}
    high = max((value for points in series.values() for _, value in points), default=0) or 1
    return _figure(heading, caption, curves(x, (0.0, high, label), series, colours, stepped=True))


def _drafts(run: Run) -> bool:
    return any(sample.drafted for sample in run.ended)


def _figure(heading: str, caption: str, content: str) -> str:
    """heading, caption and content are markup already."""
    said = f"<p>{caption}</p>" if caption else ""
    return f"<figure><figcaption><h3>{heading}</h3>{said}</figcaption>{content}</figure>"
