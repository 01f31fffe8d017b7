"""The picture of `bench pipeline`, as a file that any viewer opens; the path's suffix chooses the format."""

from tailrace.app.files.figures import new_figure, save
from tailrace.app.files.output_file import OutputFile
from tailrace.app.style.palette import SERIES

SHADES = (SERIES[1], SERIES[2], SERIES[6])


def pipelines(file: OutputFile, result: dict) -> None:
    """Draws speed over the overlapped baseline and bubbles of every arrangement: means with the range over the seeds.
    There are bars without drafts, with drafts, and with one prompt a worker.
    """
    figure, panels = new_figure(12, 4.5, 1, 2)
    names = list(result["regimes"]["few_answers"])
    sets = {
        "without drafts": [result["runs"][name] for name in names],
        "with history drafts": [result["runs"][f"{name}+drafts"] for name in names],
        "without drafts, one prompt a worker": [result["regimes"]["few_answers"][name] for name in names],
    }
    titles = {"ratio_overlapped": "times as fast as with barriers", "bubbles": "workers' time without work"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
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
    save(figure, file)
