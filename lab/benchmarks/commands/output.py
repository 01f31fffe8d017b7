"""The output of benchmark commands: progress on stderr, figures on stdout as lines or as one JSON object."""

import json
from pathlib import Path

import click

from tailrace.app.errors import BadInput
from tailrace.app.files.figures import PICTURE
from tailrace.app.files.output_file import OutputFile

AS_JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")


def picture_file(plot: Path | None) -> OutputFile | None:
    """Returns the file of --plot, or None without one. Raises BadInput for another suffix than .png, .svg and .pdf, and
    if the file cannot be written or holds something else.
    """
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--plot {plot}: give a path that ends in .png, .svg or .pdf")
    return OutputFile.of(plot, "--plot", PICTURE)


def say(text: str) -> None:
    click.echo(text, err=True)


def numbers(text: str, option: str, most: int) -> list[int]:
    """Returns the numbers of an option, sorted. Raises BadInput unless all are from 1 to `most`."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > most:
        raise BadInput(f"{option} {text}: give numbers from 1 to {most} with commas between")
    return found


def print_result(result: dict, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result))
        return
    for key, value in result.items():
        if not isinstance(value, dict):
            click.echo(f"{key:24} {value}")
            continue
        for name, inner in value.items():
            click.echo(f"{key:24} {name}: {json.dumps(inner)}")
