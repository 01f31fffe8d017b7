"""The picture of `bench live --drafts`, as a file that any viewer opens. The path's suffix selects the format."""

from tailrace.app.files.figures import new_figure, save
from tailrace.app.files.output_file import OutputFile
from tailrace.app.style.palette import PART, SERIES, WHOLE

WINDOW = 8
"""Number of looks that a point of a curve covers: with a single one the curve jumps."""

COLOURS = len(SERIES)
"""Number of colours in a cycle: later curves repeat the colours with dashes."""


def acceptance_over_time(file: OutputFile, runs: dict[str, dict], series: dict) -> None:
    """Draws tokens per verification over the seconds of each run, and the makespans and tails of all runs as bars."""
    figure, (curves, bars) = new_figure(12, 4.5, 1, 2, width_ratios=(2, 1))
    for number, (name, looks) in enumerate(series.items()):
        points = [
            (b.at_s, (b.work["tokens"] - a.work["tokens"]) / (b.work["verifications"] - a.work["verifications"]))
            for a, b in zip(looks, looks[WINDOW:], strict=False)
            if a.work.get("verifications") is not None and b.work["verifications"] > a.work["verifications"]
        ]
        if points:
            width, dashes = 2.5 if name == "goodput" else 1.2, "-" if number < COLOURS else "--"
            curves.plot(*zip(*points, strict=True), label=name, linewidth=width, linestyle=dashes)
    curves.set(xlabel="seconds since the rollout began", ylabel="tokens per verification", title="Acceptance length")
    curves.legend(ncols=2, fontsize="small")
    names = list(runs)
    bars.barh(names, [run["makespan_s"] for run in runs.values()], color=WHOLE, label="makespan")
    bars.barh(names, [run["tail_s"] for run in runs.values()], height=0.4, color=PART, label="tail")
    bars.set(xlabel="seconds", title="Makespan and tail")
    bars.invert_yaxis()
    bars.legend(fontsize="small")
    save(figure, file)
