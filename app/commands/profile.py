"""`python -m app profile`: what a step of the configured engine costs on this machine."""

import json
from pathlib import Path

import click

from app.config import DEFAULT_CONFIG, load_config
from app.errors import BadInput


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Also write the JSON to this file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(config, out, as_json):
    """Time engine steps by chunks, draft tokens and context, and prompts by length; about a minute on a CPU.

    Engines measure the same of themselves, as they start and while they work; this is for people and for simulations.
    """
    file = load_config(config)
    if out is not None and not out.resolve().parent.is_dir():
        raise BadInput(f"--out {out}: its folder does not exist")
    from app.bench.stepcost import measure
    from app.model import resolve_model

    engine = file.application.args.engine
    engine = engine.model_copy(update={"model": str(resolve_model(engine.model))})
    result = measure(engine, lambda text: click.echo(text, err=True))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="milliseconds a step")
    for column in ("chunks", "draft tokens", "context tokens", "step ms", "ms a token"):
        table.add_column(column, justify="right")
    for step in result["steps"]:
        tokens = step["chunks"] * (1 + step["draft_tokens"])
        cells = (step["chunks"], step["draft_tokens"], step["context_tokens"], step["step_ms"])
        table.add_row(*map(str, cells), f"{step['step_ms'] / tokens:.2f}")
    Console().print(table)
    for tokens, took_ms in result["prefill_ms"].items():
        Console().print(f"a prompt of {tokens} tokens: {took_ms} ms")
    Console().print("fit:", ", ".join(f"{key} {value}" for key, value in result["fit"].items()))
