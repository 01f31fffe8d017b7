"""`tailrace bench calibrate`: the simulator's prediction for this machine, beside what is measured on it."""

import json
from pathlib import Path

import click

from tailrace.app.config import DEFAULT_CONFIG, load_config
from tailrace.app.errors import BadInput
from tailrace.app.strict_json import parse_object


@click.command("calibrate")
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--prompts", type=click.IntRange(min=2), default=7, show_default=True)
@click.option("--samples", type=click.IntRange(min=1), default=5, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=2048, show_default=True, help="Per sample.")
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--running", type=click.IntRange(min=1), default=8, show_default=True,
              help="Most samples at once on a replica; fewer than there are, so that order matters.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=4, show_default=True, help="The medians count.")
@click.option("--config", type=click.Path(path_type=Path), default=DEFAULT_CONFIG, show_default="serve.yaml")
@click.option(
    "--profile", type=click.Path(path_type=Path), default=None, help="Of `tailrace profile --out`; else measured."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(trace, prompts, samples, max_tokens, chunk_tokens, running, repeats, config, profile, as_json):
    """Roll out a replayed workload live and simulated, under three policies that take turns; about half an hour.

    `error`: the simulated value over the measured one, less 1. It is given for the makespan, and for the time that the
    last 10 % of the samples take.
    """
    file, known = load_config(config), None if profile is None else _profile(profile)
    from tailrace.app.files.traces import read_trace, replay_groups

    lines = read_trace(trace)
    from tailrace.app.config import with_engine
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.benchmarks.live.calibrate import measure

    engine = file.application.args.engine
    encode = Prompts(str(resolve_model(engine.model)), engine.max_model_len).encode
    groups = replay_groups(lines, encode, prompts=prompts, samples=samples, max_tokens=max_tokens)
    _check_fit(groups, engine.max_model_len)
    file = with_engine(file, {"max_running": running})
    result = measure(file, groups, chunk_tokens, repeats, known, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _check_fit(groups, max_model_len: int) -> None:
    """Raises BadInput if a sample does not fit into the model's context: a live sample would end there, a simulated one
    would not.
    """
    for group in groups:
        longest = len(group.token_ids) + max(map(len, group.forced_token_ids)) + 1
        if longest > max_model_len:
            raise BadInput(
                f"prompt {group.prompt_id!r} has {longest} tokens with its longest sample; the model's context is "
                f"{max_model_len}: give a smaller --max-tokens"
            )


def _profile(path: Path) -> dict:
    try:
        profile = parse_object(path.read_bytes())
        _ = [float(profile["fit"][key]) for key in ("base_ms", "per_token_ms", "per_context_token_us")]
        _ = {int(tokens): float(took_ms) for tokens, took_ms in profile["prefill_ms"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"--profile {path}: not a file of `tailrace profile --out`: {error!r}") from error
    return profile


def _print(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="live and simulated, seconds")
    for column in ("policy", "makespan", "simulated", "error", "tail", "simulated", "error"):
        table.add_column(column, justify="right")
    for name, error in result["error"].items():
        cells = []
        for what in ("makespan", "tail"):
            live, modelled = result["live"][name][f"{what}_s"], result["simulated"][name][f"{what}_s"]
            cells += [f"{live:.1f}", f"{modelled:.1f}", "" if error[what] is None else f"{error[what]:+.1%}"]
        table.add_row(name, *cells)
    Console().print(table)
    Console().print("ranking:", result["ranking"], "the same" if result["same_ranking"] else "not the same")
    Console().print("profile:", result["profile"])
