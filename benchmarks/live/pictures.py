"""The picture of `bench live --drafts`, as a file that any viewer opens; the path's suffix says which kind."""

from pathlib import Path

WINDOW = 8
"""Looks that a point of a curve is taken over: with one alone it jumps."""

COLOURS = 10
"""Of a cycle: from there on they come again."""


def acceptance_over_time(path: Path, runs: dict[str, dict], series: dict) -> None:
    """Tokens per verification over the seconds of each run, and the makespans beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    curves, bars = figure.subplots(1, 2, width_ratios=(2, 1))
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
    bars.barh(names, [run["makespan_s"] for run in runs.values()], color="lightsteelblue", label="makespan")
    bars.barh(names, [run["tail_s"] for run in runs.values()], height=0.4, color="darkorange", label="tail")
    bars.set(xlabel="seconds", title="Makespan and tail")
    bars.invert_yaxis()
    bars.legend(fontsize="small")
    figure.savefig(path)
