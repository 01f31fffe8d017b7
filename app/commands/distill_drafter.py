"""`tailrace distill-drafter`: a draft model, made from its target and recorded rollouts."""

import json
from contextlib import contextmanager
from pathlib import Path

import click

from tailrace.app.errors import BadInput, Failed
from tailrace.app.files.output_file import folder_problem

SAID = {
    "loss": "KL divergence from the target, nats",
    "greedy": "likeliest tokens that agree",
    "independent": "accepted, drafts drawn apart: sum of min(p, q)",
    "shared": "accepted, drafts drawn with the sample's noise",
}


@click.command("distill-drafter")
@click.option("--model", default="demo", show_default=True, help="The target: a Hugging Face folder, or demo.")
@click.option("--rollouts", type=click.Path(path_type=Path), required=True, multiple=True,
              help="Rollouts of `rollout --out`, or a dump that `history import` reads; may be repeated.")  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Folder of the draft model; must not exist."
)
@click.option("--layers", type=click.IntRange(min=2), default=4, show_default=True, help="Layers to keep.")
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True, help="Max minutes."
)
@click.option("--steps", type=click.IntRange(min=1), default=1000, show_default=True, help="Max steps.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="As sampled.",
)
@click.option("--max-tokens", type=click.IntRange(min=16), default=384, show_default=True,
              help="Max tokens of a prompt and its answer; longer ones are cut.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object, the last line of stdout.")
def command(model, rollouts, out, layers, minutes, steps, temperature, max_tokens, seed, as_json):
    """Keep some of a model's layers and train them on the target's own distribution over rollouts.

    The figures are of prompts that were held out, before and after. Where --minutes is ample, the same seed gives the
    same model.
    """
    from tailrace.app.model import resolve_model

    if (problem := folder_problem(out.resolve().parent)) is not None:
        raise BadInput(f"--out {out}: {problem}")
    if out.exists() or out.is_symlink():
        raise BadInput(f"--out {out}: is there already; remove it or choose another")
    folder = resolve_model(model)
    from tailrace.app.distill.drafter import Course, make_drafter
    from tailrace.app.distill.texts import read_texts
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.deployments.vllm_exact.tokenizer_check import outputs

    texts = read_texts(list(rollouts), Prompts(str(folder), 0).encode, outputs(folder), max_tokens, seed)
    click.echo(f"{len(texts.taught)} answers to learn from, {len(texts.held_out)} held out", err=True)
    try:
        with _bar() as said:
            result = make_drafter(folder, texts, out, Course(layers, steps, minutes, temperature, seed), said)
    except KeyboardInterrupt as error:
        raise Failed(f"interrupted; nothing is at {out}") from error
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


@contextmanager
def _bar():
    """Yields a callback for the progress of the training: a bar on a terminal, a line per report elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console, seen = Console(stderr=True), None
    columns = (TextColumn("teaching"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal,
                  transient=True) as bar:  # fmt: skip
        task = bar.add_task("", total=1.0)

        def said(now) -> None:
            nonlocal seen
            held = now.held_out
            text = (
                f"step {now.steps}, loss {now.loss:.2f}; held out: greedy {held.greedy:.2f}, shared {held.shared:.2f}"
            )
            bar.update(task, completed=now.done, description=text)
            if held is not seen and not console.is_terminal:
                console.print(f"{now.done:.0%}: {text}", highlight=False)
            seen = held

        yield said


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("held out", "before", "after", title=f"{result['layers']} layers, {result['steps']} steps")
    for key, text in SAID.items():
        table.add_row(text, *(f"{result[when][key]:.3f}" for when in ("before", "after")))
    console = Console()
    console.print(table)
    millions = f"{result['parameters'] / 1e6:.0f} of {result['target_parameters'] / 1e6:.0f} million parameters"
    console.print(f"{result['out']}: {millions}, {result['seconds']} s", highlight=False)
