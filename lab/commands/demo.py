"""`tailrace demo`: the same prompts by static groups and by Tailrace, live or recorded."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import Failed
from tailrace.app.files.output_file import OutputFile, output_folder

SAMPLES = 4
MAX_TOKENS = 2048
TEMPERATURE = 0.7
"""Sampling temperature of the demo: at 0.7 two of the small model's 64 answers do not stop by themselves, and half have
at most 151 tokens.
"""

LIVE = "about 3 minutes on two idle cores: 1 to start a service, 2 for both runs"
REPLAY = "about half a minute: a recorded run, played faster than it was; no engine runs"

NEXT = {
    "live": (
        ("rollout --prompts lab/demo/prompts.jsonl --samples 8 --out out/rollouts.jsonl", "samples into a file"),
        ("verify", "scheduling changes no token: the proof, on this machine"),
        ("simulate --workload moonlight --scale 0.25 --compare verl,tailrace", "the same on a paper's cluster"),
    ),
    "replay": (
        ("demo", "the same, live"),
        ("simulate --workload moonlight --scale 0.25 --compare verl,tailrace", "the same on a paper's cluster"),
        ("policies", "the parts of the decisions, and their knobs"),
    ),
}


@click.command()
@click.option("--replay", is_flag=True, help="Show a recorded run: no engine, half a minute.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/demo"), show_default=True, help="A folder.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object, the last line of stdout.")
def command(replay, out, config, as_json):
    """Roll out the same prompts by static groups and by Tailrace; compare both, and draw them on one page."""
    from tailrace.lab.demo.outcome import RECORDED, read
    from tailrace.lab.demo.page import page
    from tailrace.lab.report.document import PAGE

    output_folder(out, "--out")
    drawn = OutputFile(out / ("replay.html" if replay else "timeline.html"), "--out", PAGE)
    click.echo(f"demo: {REPLAY if replay else LIVE}", err=True)
    if not replay:
        _roll_out(load_config(config), out)
    outcome = read(RECORDED if replay else out)
    if replay and not as_json:
        from tailrace.lab.demo.film import play

        play(outcome)
    figures = outcome.figures()
    drawn.write(page(outcome, figures))
    if as_json:
        click.echo(json.dumps(figures | {"page": str(drawn.path)}))
    else:
        _print(figures, drawn.path, NEXT["replay" if replay else "live"])


def _roll_out(file, out: Path) -> None:
    """Rolls out the prompts in both runs, on a service of this command, and writes the files to `out`. Raises Failed
    after Ctrl-C.
    """
    from tailrace.app.cli import version
    from tailrace.app.cluster import service
    from tailrace.app.files.prompts import read_prompts
    from tailrace.lab.demo import PROMPTS
    from tailrace.lab.demo.outcome import NAMES, output_files, write
    from tailrace.lab.demo.runs import policies_of, roll_out, same_samples

    output_files(out)
    sampling = {"temperature": TEMPERATURE}
    prompts = read_prompts(PROMPTS, {"samples": SAMPLES, "max_tokens": MAX_TOKENS, "sampling": sampling})
    _say("1 of 3: starting the service")
    try:
        with service(file, None) as client:
            replicas = len(client.status_blocking().replicas)
            runs = asyncio.run(
                roll_out(client, policies_of(file), prompts, lambda step, name: _say(f"{step} of 3: {NAMES[name]}"))
            )
    except KeyboardInterrupt as error:
        raise Failed("interrupted; `tailrace demo --replay` shows a recorded run in half a minute") from error
    same = same_samples(*(run.groups for run in runs.values()))
    about = {"cores": os.cpu_count() or 0, "replicas": replicas, "version": version(), "same_samples": same}
    write(out, {name: run.journal for name, run in runs.items()}, about)


def _say(text: str) -> None:
    click.echo(f"demo: {text}", err=True)


def _print(figures: dict, drawn: Path, following: tuple) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from tailrace.lab.demo.outcome import table

    heads, *rows = table(figures)
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for place, head in enumerate(heads):
        shown.add_column(head, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
    samples = figures["runs"]["static"]["samples"]
    click.echo(
        f"Tailrace is {figures['ratio']:.2f} times as fast as static groups; {figures['same_samples']} of {samples} "
        f"samples have the same tokens in both runs ({figures['replicas']} replicas, {figures['cores']} cores)."
    )
    click.echo(f"open {drawn}")
    click.echo("next:")
    for arguments, purpose in following:
        click.echo(f"  # {purpose}\n  {_program()} {arguments}")


def _program() -> str:
    """Returns the command as a shell can run it: its name, or its path relative to the current folder."""
    ours = Path(sys.executable).parent / "tailrace"
    if shutil.which("tailrace") == str(ours) or not ours.exists():
        return "tailrace"
    return os.path.relpath(ours)
