"""The demo's page: both runs on one time axis, their unfinished samples, and each replica's activity.

The page is made of the parts of a recorded run's page (`lab/timeline/page.py`). Called by `tailrace demo`.
"""

from collections.abc import Mapping
from html import escape

from tailrace.lab.demo.outcome import NAMES, DemoOutcome
from tailrace.lab.demo.outcome import table as rows
from tailrace.lab.report.curves import ended_share
from tailrace.lab.report.document import document, figure, interactive, legend, panel, table
from tailrace.lab.report.span_columns import drawable, longest_makespan_s, timelines
from tailrace.lab.report.svg_charts import colours_of, curves
from tailrace.lab.simulator.report import number
from tailrace.lab.timeline.page import ROW, rows_of
from tailrace.lab.timeline.replica_states import bands

TITLE = "The same prompts by static groups and by Tailrace"


def page(outcome: DemoOutcome, figures: Mapping) -> str:
    """Returns the page as text. `figures`: those of the outcome."""
    runs = {NAMES[name]: of_run.run for name, of_run in outcome.records.items()}
    shown = drawable(runs)
    of_rows = {NAMES[name]: rows_of(of_run, bands(of_run)) for name, of_run in outcome.records.items()}
    panels = [
        figure(escape(name), f"{number(run.makespan_s)} s", panel(place, f"Timeline of {name}"))
        for place, (name, run) in enumerate(runs.items())
    ]
    key = legend([("gone", "not up"), ("tail", "tail: the last 10 % of the samples")])
    body = [
        f"<h1>{TITLE}</h1>",
        f"<p class=headline><b>{figures['ratio']:.2f} ×</b> as fast, {_same(figures)}</p>",
        table(rows(figures)),
        _unfinished(runs),
        f"<h2>Replicas</h2>{interactive(ROW, key, panels)}",
    ]
    return document(TITLE, "\n".join(body), timelines(runs, shown, of_rows))


def _same(figures: Mapping) -> str:
    """Returns which samples have the same tokens in both runs, in words."""
    samples, same = figures["runs"]["static"]["samples"], figures["same_samples"]
    return "the same tokens" if same == samples else f"the same tokens in {same} of {samples} samples"


def unfinished(run) -> list[tuple[float, float]]:
    """Returns (seconds, share of samples that have not ended), at each end."""
    return [(at_s, 1.0 - share) for at_s, share in ended_share(run.ended)]


def _unfinished(runs: Mapping) -> str:
    colours = colours_of(runs)
    x = (0.0, longest_makespan_s(runs), "seconds")
    series = {name: unfinished(run) for name, run in runs.items()}
    drawn = curves(x, (0.0, 1.0, "share unfinished"), series, colours, stepped=True, share=True)
    key = legend([(colours[name], name) for name in runs])
    return f"<h2>Unfinished samples</h2>{key}<div class=charts>{figure('', '', drawn)}</div>"
