"""`tailrace bench tail`: every tail policy on two real replicas, beside the usual baselines."""

import json
from pathlib import Path

import click

from tailrace.app.config import ELASTIC_CONFIG, load_config
from tailrace.app.errors import BadInput

SHARES = (
    "ratio_to_static", "ratio_to_routed", "ratio_to_routed_suffix", "ratio_to_routed_group", "bound_share",
    "reachable_share",
)  # fmt: skip

WIDTH = 100
"""Minimum width of the table in characters: on a narrower terminal lines wrap, and no number is cut."""


@click.command("tail")
@click.option("--trace", type=click.Path(path_type=Path), required=True, help="Rollouts to replay, JSONL or JSONL.gz.")
@click.option("--prompts", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Samples per prompt.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=2048, show_default=True, help="Per sample.")
@click.option(
    "--chunk-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Not of static groups."
)
@click.option(
    "--running", type=click.IntRange(min=1), default=8, show_default=True, help="Most samples at once on a replica."
)
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="The median of each counts.")
@click.option("--runs", "only", multiple=True, metavar="NAME", help="Only these, all by default; may be given again.")
@click.option("--config", type=click.Path(path_type=Path), default=ELASTIC_CONFIG, show_default="serve.elastic.yaml")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, the last line of stdout.")
def command(trace, prompts, samples, max_tokens, chunk_tokens, running, repeats, only, config, as_json):
    """Replay rollouts under every tail policy, beside static groups and samples sent whole.

    Both baselines run without drafts and with vLLM's suffix drafts; samples sent whole run with our drafts too. The
    last checkpoint of the trace is rolled out, and the one before it is history. More than half an hour for each repeat
    of all runs.
    """
    file = load_config(config)
    if not file.application.args.replicas.come_and_go:
        raise BadInput(f"--config {config}: its replicas neither come nor go; see serve.elastic.yaml")
    from tailrace.app.files.traces import read_trace

    lines = read_trace(trace)[:prompts]
    short = next((line["prompt_id"] for line in lines if len(line["epochs"]) < 2), None)
    if short is not None:
        raise BadInput(f"{trace}: prompt {short!r} has one checkpoint; two are needed: the earlier is history")
    from tailrace.app.config import with_engine
    from tailrace.lab.benchmarks.live.tail import NAMES, measure

    unknown = next((name for name in only if name not in NAMES), None)
    if unknown is not None:
        raise BadInput(f"--runs {unknown}: no run is called so; known: {', '.join(NAMES)}")
    drafter = file.application.args.drafter
    if "draft" in only and (drafter is None or not drafter.replicas.come_and_go):
        raise BadInput(f"--runs draft: {config} has no drafter with two limits; docs/drafters.md shows draft models")
    replay = _replay(file, lines, samples, max_tokens)
    file = with_engine(file, {"max_running": running})
    result = measure(file, replay, chunk_tokens, repeats, lambda text: click.echo(text, err=True), only or NAMES)
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result)


def _replay(file, lines, samples: int, max_tokens: int):
    from tailrace.app.files.traces import replay_groups
    from tailrace.app.model import resolve_model
    from tailrace.deployments.batches.prompts import Prompts
    from tailrace.lab.benchmarks.live.tail import Replay

    engine = file.application.args.engine
    prompts = Prompts(str(resolve_model(engine.model)), engine.max_model_len)
    earlier = [line | {"epochs": [_cut(line["epochs"][-2], samples)]} for line in lines]
    sizes = {"prompts": len(lines), "samples": samples, "max_tokens": max_tokens}
    groups = replay_groups(lines, prompts.encode, **sizes)
    return Replay(groups, replay_groups(earlier, prompts.encode, **sizes), earlier, prompts)


def _cut(epoch: dict, samples: int) -> dict:
    return epoch | {"samples": epoch["samples"][:samples]}


def _print(result: dict) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the tail, seconds", box=SIMPLE, padding=0)
    seconds = ("makespan", "tail", "evened", "simu-\nlated", "replica-s", "given\nback")
    for column in (
        "run",
        *seconds,
        "to\nstatic",
        "to\nrouted",
        "with\nsuffix",
        "with\nours",
        "of the\nbound",
        "work +\nlongest",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, run in result["runs"].items():
        evened_s, simulated_s = result["evened_s"].get(name), result["simulated"].get(name, {}).get("makespan_s")
        values = (
            run["makespan_s"], run["tail_s"], evened_s, simulated_s, run["replica_s"], run["returned_replica_s"]
        )  # fmt: skip
        times = ("" if value is None else f"{value:.1f}" for value in values)
        shares = (result[key].get(name) for key in SHARES)
        ratios = ("" if share is None else f"{share:.2f}" for share in shares)
        table.add_row(name, *times, *ratios)
    Console(width=max(WIDTH, Console().width)).print(table)
