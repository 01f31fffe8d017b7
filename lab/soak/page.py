"""The page of a soak: faults on the curve of tokens per second, memory of each process, figures.

Drawn by the parts of lab/report. `tailrace soak --out DIR` writes it.
"""

from collections.abc import Mapping
from html import escape

from tailrace.lab.report.document import document, figure, legend, table
from tailrace.lab.report.svg_charts import colours_of, curves
from tailrace.lab.soak.report import faults_of, lines, memory_rows

LARGE_MB = 250.0
"""Size in MB above which a process has a separate chart, since others would be a flat line in it."""


def page(report: Mapping) -> str:
    """Returns the page as text."""
    verdict = "; ".join(faults_of(report)) or "nothing lost, nothing wrong, nothing left over"
    struck = [("time, s", "fault", "note"), *((f"{s['at_s']:.0f}", s["kind"], s["note"]) for s in report["strikes"])]
    large = {name: points for name, points in report["rss"].items() if max(mb for _, mb in points) >= LARGE_MB}
    small = {name: points for name, points in report["rss"].items() if name not in large}
    body = [
        "<h1>Soak</h1>",
        f"<p class=headline>{escape(verdict)}</p>",
        *(f"<p>{escape(line)}</p>" for line in lines(report)),
        "<h2>Over time</h2><div class=charts>",
        _tokens(report),
        *(_memory(report, name, of) for name, of in (("Large processes", large), ("Other processes", small)) if of),
        "</div>",
        "<h2>Memory and open files</h2>",
        "<p class=soft>Sums over the processes of a role that ran at the end; start: after their warm-up; MB per hour: "
        "each one's slope over the second half.</p>",
        table(memory_rows(report)),
        "<h2>Faults</h2>",
        table(struck, left=(1, 2)),
    ]
    return document("Tailrace soak", "\n".join(body), None)


def _end_s(report: Mapping) -> float:
    return max([report["seconds"], *(points[-1][0] for points in report["rss"].values())])


def _tokens(report: Mapping) -> str:
    points = report["tokens_per_s"]
    high = max((rate for _, rate in points), default=0.0) or 1.0
    marks = [(one["at_s"], f"{one['kind']}: {one['note']}") for one in report["strikes"] if one["happened"]]
    axes = (0.0, _end_s(report), "seconds"), (0.0, 1.05 * high, "tokens per second")
    drawn = curves(*axes, {"tokens": points}, {"tokens": "s1"}, stepped=True, marks=marks)
    return figure("Tokens per second", "A line across: a fault; point at it for its kind.", drawn)


def _memory(report: Mapping, heading: str, series: Mapping) -> str:
    """Returns a chart of memory. A process's colour is its role's."""
    colours = colours_of(sorted({name.rpartition(" ")[0] for name in series}))
    of_process = {name: colours[name.rpartition(" ")[0]] for name in series}
    high = max(mb for points in series.values() for _, mb in points)
    axes = (0.0, _end_s(report), "seconds"), (0.0, 1.05 * high, "RSS, MB")
    key = legend([(colour, role) for role, colour in colours.items()])
    return figure(f"{heading}: RSS", "", key + curves(*axes, series, of_process))
