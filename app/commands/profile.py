"""`tailrace profile`: the cost of a step of the configured engine, or of its draft model, on this machine."""

import json
from pathlib import Path

import click

from tailrace.app.allow_code import allow_code_option
from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.app.files.output_file import OutputFile, OutputKind, check_apart

PROFILE = OutputKind("a file of `profile --out`", (b'{\n "model": "',), (b'"steps": [',))


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@allow_code_option
@click.option("--drafter", is_flag=True, help="Profile the draft model, `args.drafter`, instead of the engine.")
@click.option(
    "--context",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Tokens, for `draft_models: planned`.",
)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Also write the JSON to this file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(config, drafter, context, out, as_json):
    """Time engine steps by chunks, draft tokens and context, and prompts by length; about a minute on a CPU.

    Engines measure the same by themselves, as they start and while they work; this is for people, for simulations, and
    for the figures that `policies.draft_models: planned` goes by, of samples that have this many tokens on average.
    """
    args = load_config(config).application.args
    check_apart({"--out": out}, {"--config": config})
    out = OutputFile.of(out, "--out", PROFILE)
    if drafter and args.drafter is None:
        raise BadInput(f"{config}: args.drafter is null: name a draft model there")
    from tailrace.app.model import resolve_model
    from tailrace.app.step_profile import DRAFTS, measure, planner_step

    engine = args.drafter.engine(args.engine) if drafter else args.engine
    engine = engine.model_copy(update={"model": str(resolve_model(engine.model))})
    result = measure(engine, lambda text: click.echo(text, err=True), (0,) if drafter else DRAFTS)
    result["planned"] = {"drafter" if drafter else "verifier": planner_step(result["fit"], context, drafter)}
    if out is not None:
        out.write(json.dumps(result, indent=1) + "\n")
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
    Console().print("for policies.draft_models planned:", json.dumps(result["planned"]))
