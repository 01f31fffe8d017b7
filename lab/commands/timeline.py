"""`tailrace timeline`: the activity of every replica in a recorded run, as a page, for Perfetto or as figures."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import click

from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import OutputFile, check_apart

KINDS = (".html", ".perfetto.json")


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="File of the drawing: x.html or x.perfetto.json.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(run, out, as_json):
    """Draw a recorded run: replicas as rows, with samples, moves and won races over time.

    RUN is a file of `rollout --journal`, plain or gzipped. Without --out only the figures are shown. x.perfetto.json is
    for Perfetto (ui.perfetto.dev) or its trace processor, where SQL can query chunks with their drafts and KV.
    """
    from tailrace.lab.timeline.figures import figures
    from tailrace.lab.timeline.record import record
    from tailrace.lab.timeline.replica_states import bands

    if out is not None and not out.name.endswith(KINDS):
        raise BadInput(f"--out {out}: give a file of an existing folder, ending in {' or '.join(KINDS)}")
    check_apart({"--out": out}, {"RUN": run})
    drawing = OutputFile.of(out, "--out", _kind(out))
    try:
        recorded = record(_lines(run))
    except ValueError as error:
        raise BadInput(f"{run}: {error}; give a file of `rollout --journal`") from error
    found = bands(recorded)
    said = figures(recorded, found)
    if drawing is not None:
        click.echo(f"drawing {out}", err=True)
        _draw(drawing, run.name, recorded, found, said)
    if as_json:
        click.echo(json.dumps(said))
    else:
        _print(said)


def _lines(run: Path) -> Iterator[str]:
    """Yields the lines of the journal, with a bar on a terminal. Raises BadInput if the journal cannot be read."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    opened = gzip.open if run.suffix == ".gz" else open
    try:
        with (
            opened(run, "rt", encoding="utf-8") as file,
            Progress(console=console, disable=not console.is_terminal, transient=True) as bar,
        ):
            yield from bar.track(file, description="reading", total=None)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{run}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _kind(out: Path | None):
    """Returns the kind of a drawing by the name of its file, or None without a file."""
    if out is None:
        return None
    if out.suffix == ".html":
        from tailrace.lab.report.document import PAGE

        return PAGE
    from tailrace.lab.timeline.perfetto import TRACE

    return TRACE


def _draw(out: OutputFile, title: str, recorded, found, said: dict) -> None:
    if out.path.suffix == ".html":
        from tailrace.lab.timeline.page import page

        out.write(page(title, recorded, found, said))
    else:
        from tailrace.lab.timeline.perfetto import trace_events

        out.write(json.dumps(trace_events(title, recorded, found)))


def _print(said: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    from tailrace.lab.simulator.report import percent
    from tailrace.lab.timeline.figures import seconds
    from tailrace.lab.timeline.page import drafts_and_kv

    table = Table(
        "replica", "up s", "busy", "tokens", title=f"{seconds(said['makespan_s'])} s, {said['samples']} samples"
    )
    for name, one in said["replicas"].items():
        table.add_row(name, seconds(one["up_s"]), percent(one["busy_share"]), f"{one['tokens']:,}")
    console = Console()
    console.print(table)
    wins = ", ".join(f"{method} {count}" for method, count in said["wins"].items()) or "none"
    lines = {
        **{key.replace("_", " "): seconds(said[key]) for key in ("makespan_s", "tail_s", "replica_s")},
        "moves": f"{said['moves']:,}",
        "races": f"{len(said['races']):,}, won by {wins}" if said["races"] else "none",
        "drafts and KV": ", ".join(drafts_and_kv(said)) or "none",
        "weights": ", ".join(f"{one['version']} at {seconds(one['at_s'])} s" for one in said["weights"]),
        "roles, replica s": ", ".join(f"{role} {seconds(took_s)}" for role, took_s in said["role_s"].items()),
    }  # fmt: skip
    for key, value in lines.items():
        console.print(f"{key}: {value}", highlight=False, markup=False)
