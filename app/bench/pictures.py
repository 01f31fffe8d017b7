"""The pictures of the benchmarks, as files that any viewer opens (the suffix of the path says which kind)."""

from pathlib import Path

WINDOW = 8
"""Looks that a point of a curve is taken over: with one alone it jumps."""

COLOURS = 10
"""Of a cycle: from there on they come again."""

SHADES = ("steelblue", "darkorange", "lightsteelblue")


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


def pipelines(path: Path, result: dict) -> None:
    """Of `bench pipeline`: speed over the overlapped baseline and bubbles of every arrangement, means with the range
    over the seeds, without drafts, with them, and with one prompt a worker."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    names = list(result["regimes"]["few_answers"])
    sets = {
        "without drafts": [result["runs"][name] for name in names],
        "with history drafts": [result["runs"][f"{name}+drafts"] for name in names],
        "without drafts, one prompt a worker": [result["regimes"]["few_answers"][name] for name in names],
    }
    titles = {"ratio_overlapped": "times as fast as with barriers", "bubbles": "workers' time without work"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for index, (label, rows) in enumerate(sets.items()):
            mean, least, most = zip(*(row[key] for row in rows), strict=True)
            reach = [[m - low for m, low in zip(mean, least, strict=True)],
                     [high - m for m, high in zip(mean, most, strict=True)]]  # fmt: skip
            places = [place + 0.27 * (index - 1) for place in range(len(names))]
            axes.barh(places, mean, height=0.25, xerr=reach, label=label, color=SHADES[index])
        axes.set(yticks=range(len(names)), yticklabels=[name.replace("_", " ") for name in names], xlabel=title)
        axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(f"{result['workload']}, {result['steps']} steps, {result['seeds']} draws")
    figure.savefig(path)
