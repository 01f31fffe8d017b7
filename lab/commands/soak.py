"""`tailrace soak`: an hour of random faults; exit 0 if nothing was lost or wrong, 1 otherwise."""

import json
from pathlib import Path

import click

from tailrace.app.allow_code import allow_code_option
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.output_file import OutputFile, OutputKind, output_folder
from tailrace.app.files.prompts import read_prompts
from tailrace.lab.demo import PROMPTS

MIN_PROMPTS = 4

REPORT = OutputKind("the report of a soak", (b'{"seconds": ',), (b'"strikes": [',))


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
              help="Under faults; references and checks come on top.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the faults.")
@click.option("--kinds", default=None, metavar="A,B", show_default="all", help="Only faults of these kinds.")
@click.option("--gap-s", type=(float, float), default=(20.0, 60.0), show_default=True, metavar="MIN MAX",
              help="Seconds between two faults.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, show_default="the demo's")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option("--out", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="Write soak.json and soak.html there.")  # fmt: skip
@allow_code_option
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object, the last line of stdout.")
def command(minutes, seed, kinds, gap_s, prompts, config, out, as_json):
    """Disturb a real service at random for an hour, and compare every token with undisturbed references.

    A trainer updates weights between its batches; the batches of an evaluator run across the updates. Ctrl-C ends the
    soak with the report so far.
    """
    file = load_config(config)
    groups = _prompts(prompts)
    if not 0 < gap_s[0] <= gap_s[1]:
        raise BadInput(f"--gap-s {gap_s[0]:g} {gap_s[1]:g}: give two numbers above 0, the smaller one first")
    if file.application.args.pool is None:
        raise BadInput(f"{config}: applications.0.args.pool is null: there is no pool to disturb")
    files = None if out is None else _output_files(out)
    from tailrace.lab.soak.faults import KINDS
    from tailrace.lab.soak.report import faults_of
    from tailrace.lab.soak.run import SoakPlan, soak

    chosen = tuple(kinds.split(",")) if kinds else tuple(KINDS)
    unknown = next((kind for kind in chosen if kind not in KINDS), None)
    if unknown is not None:
        raise BadInput(f"--kinds {unknown}: known: {', '.join(KINDS)}")
    report = soak(file, groups, SoakPlan(minutes, seed, chosen, gap_s), lambda text: click.echo(text, err=True))
    if files is not None:
        _write(*files, report)
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)
    if found := faults_of(report):
        raise Failed("; ".join(found))


def _prompts(path: Path) -> list:
    found = read_prompts(path, {"samples": 1, "max_tokens": 1, "sampling": {"temperature": 1.0}})
    if len(found) < MIN_PROMPTS:
        raise BadInput(f"{path}: holds {len(found)} prompts; a soak takes {MIN_PROMPTS} or more")
    return found


def _output_files(out: Path) -> tuple[OutputFile, OutputFile]:
    """Returns the files of the report and of its page."""
    from tailrace.lab.report.document import PAGE

    output_folder(out, "--out")
    return OutputFile(out / "soak.json", "--out", REPORT), OutputFile(out / "soak.html", "--out", PAGE)


def _write(figures: OutputFile, drawn: OutputFile, report: dict) -> None:
    from tailrace.lab.soak.page import page

    figures.write(json.dumps(report))
    drawn.write(page(report))
    click.echo(f"written: {figures.path}, {drawn.path}", err=True)


def _print(report: dict) -> None:
    from tailrace.lab.soak.report import lines, memory_rows

    for line in lines(report):
        click.echo(line)
    rows = memory_rows(report)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *cells in rows:
        rest = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        click.echo("  ".join((name.ljust(widths[0]), *rest)))
