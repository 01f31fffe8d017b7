"""Figures as files, by matplotlib: made, coloured and saved the same way. The path's suffix decides the kind of file.

matplotlib is loaded when a figure is made, since the light installation does not have it. Called by the timeline's
picture and by benchmarks.
"""

from io import BytesIO

from tailrace.app.errors import MissingExtra
from tailrace.app.files.output_file import OutputFile, OutputKind
from tailrace.app.style.palette import SERIES

DPI = 110

MADE_BY = "Tailrace"
SIGNS = {"png": "Software", "svg": "Creator", "pdf": "Creator"}
"""The metadata entry that names a file's maker, by the kind of file."""

PICTURE = OutputKind("a picture of ours", (b"\x89PNG\r\n", b"<?xml", b"%PDF-"), (MADE_BY.encode(),))


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **layout):
    """Returns a figure of width x height inches and its axes, which use the palette's series one after the other.

    `layout`: passed to matplotlib's `Figure.subplots`. Raises MissingExtra if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtra("matplotlib is not installed; run: pip install 'tailrace[bench]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, **layout)
    for one in figure.axes:
        one.set_prop_cycle(color=[*SERIES[1:], SERIES[0]])
    return figure, axes


def save(figure, file: OutputFile, dpi: int = DPI) -> None:
    """Writes the figure: x.png, x.svg or x.pdf."""
    kind, drawn = file.path.suffix.removeprefix("."), BytesIO()
    figure.savefig(drawn, format=kind, dpi=dpi, metadata={SIGNS[kind]: MADE_BY})
    file.write(drawn.getvalue())
